"""Bytes on the wire of the program that runs, counted at the dispatcher where every collective passes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_ref.parallel.mesh import EXPERT_SHARDS, SHARDS, TOKENS, over
from torch_ref.runtime.compat import TorchDispatchMode, group_named, is_process_group

KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "permute",
}
SILENT = {"recv_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}  # send no tensor


class Traffic(TorchDispatchMode):
    """Counts every collective of this rank within it: c10d's own and the functional ones that DTensor issues.

    Bytes are what a device sends with ring algorithms over n devices: all-gather, reduce-scatter and
    broadcast (n-1)/n of the full array, all-reduce twice that. DDP's all-reduces are seen because its
    communication hook calls c10d. `ends`: a group of some ranks of `pipeline`.
    """

    def __init__(self, mesh: DeviceMesh, ends: dist.ProcessGroup | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        wide = [axis for axis, size in sizes.items() if size > 1]
        # Where one axis spans all ranks its group may be the default one: the narrower name is set last.
        self.axes = {dist.group.WORLD.group_name: "+".join(wide)} if dist.group.WORLD else {}
        for axes in (TOKENS, SHARDS, ("data", *EXPERT_SHARDS), EXPERT_SHARDS, *((axis,) for axis in wide)):
            part = over(mesh, *axes)
            self.axes[part.get_group().group_name] = "+".join(part.mesh_dim_names or ())
        self.axes |= {ends.group_name: "pipeline"} if ends else {}
        self.counts: Counter[tuple[str, str, str, bool]] = Counter()
        self.sent: Counter[tuple[str, str, str, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # comes back as the local tensors' operations
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
            if name not in KINDS:
                raise NotImplementedError(f"{func}: its bytes are not counted yet")
            self._count(KINDS[name], args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Any) -> None:
        group = next(filter(None, map(_group, args)))
        n = group.size()
        if n == 1:
            return
        tensors = list(_tensors(args))
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        sizes = [t.numel() * t.element_size() for t in tensors]
        # Among input and output the larger is the full array; functional gathers show their input alone.
        full = max(sizes) * (n if op == "all_gather" and len(sizes) == 1 else 1)
        key = (op, self.axes[group.group_name], dtype, op == "all_reduce" and tensors[0].numel() == 1)
        self.counts[key] += 1
        sent = full if op == "permute" else (2 if op == "all_reduce" else 1) * full * (n - 1) / n
        if op == "all_to_all":  # in unequal parts, all but its own
            parts = args[2]
            sent = sizes[0] * (1 - parts[group.rank()] / max(1, sum(parts)))
        self.sent[key] += sent  # type: ignore[assignment]

    def collectives(self) -> list[dict[str, Any]]:
        """Entries of summary.json: one per kind of collective; sums of a `single` number have entries of their own."""
        return [
            {
                "op": op,
                "axis": axis,
                "dtype": dtype,
                "single": single,
                "count": self.counts[op, axis, dtype, single],
                "bytes": float(sent),
            }
            for (op, axis, dtype, single), sent in sorted(self.sent.items())
        ]


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, torch.ScriptObject) and is_process_group(argument):
        return dist.ProcessGroup.unbox(argument)
    if isinstance(argument, dist.ProcessGroup):
        return argument
    known = isinstance(argument, str) and argument not in ("sum", "avg", "max", "min", "product")
    return group_named(argument) if known else None


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)
