"""The process: how ranks start and end, compiled programs on disk, the allocator, options of the compiler.

Imports `config`, `runs`.
"""
