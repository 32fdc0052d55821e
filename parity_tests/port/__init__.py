"""The proof of a model that is not a family of ours: a port from torch to JAX by its author.

Imports `runs`, `expected`, `proof`, `report`.
"""
