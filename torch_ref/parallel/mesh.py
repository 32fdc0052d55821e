"""Sub-meshes by the names of their axes."""

from torch.distributed.device_mesh import DeviceMesh

from torch_ref.runtime.compat import one_dimensional

BATCH = ("data", "fsdp", "expert")  # the mesh axes that split rows of the batch
SHARDS = ("fsdp", "expert", "context")  # those that split what a strategy shards
EXPERT_SHARDS = ("fsdp", "context")  # the same for experts, which `expert` splits already
TOKENS = ("data", *SHARDS)  # those over which tokens differ, and so gradients are summed


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Number of devices along a named axis."""
    return mesh[axis].size()


def rank_over(mesh: DeviceMesh, *axes: str) -> tuple[int, int]:
    """(rank, size) of this process over several axes taken as one, the last varying fastest."""
    place, size = 0, 1
    for axis in axes:
        place, size = place * axis_size(mesh, axis) + mesh.get_local_rank(axis), size * axis_size(mesh, axis)
    return place, size


def over(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """One-dimensional mesh over several axes, named by those that have more than one device."""
    several = [axis for axis in axes if axis_size(mesh, axis) > 1] or [axes[0]]
    return mesh[several[0]] if len(several) == 1 else one_dimensional(mesh[tuple(several)], "+".join(several))
