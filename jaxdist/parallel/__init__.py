"""How arrays lie on a mesh, and what its devices send: sharding, collectives, context, experts, pipeline.

Imports `config`, `runtime`, `ops`. It knows no family of models.
"""
