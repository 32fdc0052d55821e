"""The proof: its levels, the search for the first difference, its cause, and the verdict.

Imports `runs`, `expected`.
"""
