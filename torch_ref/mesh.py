"""Sub-meshes by the names of their axes."""

from torch.distributed.device_mesh import DeviceMesh

SHARDS = ("fsdp", "context")  # the mesh axes that split what a strategy shards
TOKENS = ("data", *SHARDS)  # those over which tokens differ, and so gradients are summed


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Devices along a named axis."""
    return mesh[axis].size()


def over(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The one-dimensional mesh over several axes, called by the names of those that have more than one device."""
    several = [axis for axis in axes if axis_size(mesh, axis) > 1] or [axes[0]]
    return mesh[several[0]] if len(several) == 1 else mesh[tuple(several)]._flatten("+".join(several))
