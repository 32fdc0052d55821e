"""Operations on arrays of one device: attention, matrix products, rotations, types within `jax.shard_map`.

Imports `config`. No function here sends anything over a mesh axis.
"""
