"""The proof of a model that neither side contains: a port from torch to JAX by its author."""
