"""The proof of a model that is no family of ours: a port from torch to JAX by its author.

Imports `runs`, `expected`, `proof`, `report`.
"""
