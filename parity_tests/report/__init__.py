"""The page and the figures of a proof.

Imports `runs`, `proof`.
"""
