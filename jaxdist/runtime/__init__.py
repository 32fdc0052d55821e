"""The process: start of ranks, compilation cache, allocator, compiler options. Imports `config` and `runs`."""
