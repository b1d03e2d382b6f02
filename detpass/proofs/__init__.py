"""When no rewrite is needed: injective index maps, exact arithmetic, writers that carry equal values."""
