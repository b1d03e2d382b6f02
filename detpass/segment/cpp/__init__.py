"""The C++ sources of the CPU kernels: data files that ``segment/build.py`` compiles."""
