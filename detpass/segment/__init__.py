"""The arithmetic that replaces atomics: canonical-order accumulation over tensors, usable without a compiler."""
