"""Placement of arrays on a mesh, and communication between its devices: sharding, collectives, context, experts,
pipeline.

Imports `config`, `runtime`, `ops`. It knows no family of models.
"""
