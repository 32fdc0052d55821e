"""Sizes that a mesh divides, and the changes after which it divides all of them at once.

A fix for one size alone can break another: heads that the mesh divides may not divide the width.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from jaxdist.config.parallel import AXES, written

if TYPE_CHECKING:
    from jaxdist.config.experiment import Experiment

CHUNKS = {"ring": 2, "ulysses": 1}  # of times that a device of the mesh axis context has
BATCH = ("data", "fsdp", "expert")
SHARDS = ("fsdp", "expert", "context")
# Sizes that change the model: a mesh is fitted to them. The others are fitted to the mesh.
OF_MODEL = {"heads", "kv_heads", "dim", "hidden", "head_dim", "layers", "experts"}
FIELDS = {"batch": "train.batch", "sequence": "data.sequence"}  # all other sizes are fields of the model
Need = tuple[tuple[str, ...], int]  # sizes, whose product has to be a multiple of the number


def sizes_to_grow(e: "Experiment", axes: Mapping[str, int]) -> dict[str, int]:
    """Field -> value, for each that has to be larger before the mesh divides all sizes."""
    own = _sizes(e)
    sizes = dict(own)
    while True:
        before = dict(sizes)
        for names, parts in needs(e, axes):
            *others, name = names
            _grow(sizes, name, parts // math.gcd(parts, math.prod(sizes[other] for other in others)))
        if e.model.has_head_dim:
            _grow(sizes, "heads", sizes["kv_heads"])
            _grow(sizes, "head_dim", 2)
        elif e.model.heads:
            _grow(sizes, "dim", sizes["heads"])
        if e.model.positions:
            sizes["positions"] = max(sizes["positions"], sizes["sequence"])
        if sizes == before:  # no size is ever passed beyond a multiple of all that it needs
            return {field(name): size for name, size in sizes.items() if size != own[name]}


def mesh_to_fit(e: "Experiment", axes: Mapping[str, int], over: Iterable[str], needed: str) -> dict[str, int]:
    """The largest mesh, with the axes `over` made smaller, or if need be others too, that divides the size `needed` and
    all that belong to the model."""
    sizes, fixed = _sizes(e), OF_MODEL | {needed}

    def fits(mesh: Mapping[str, int]) -> bool:
        divides = all(
            math.prod(sizes[name] for name in names) % parts == 0 for names, parts in needs(e, mesh) if {*names} & fixed
        )
        return divides and (not e.pinned or e.pinned.isdisjoint(sizes_to_grow(e, mesh)))

    def choices(axis: str) -> list[int]:
        alone = dict.fromkeys(AXES, 1)
        return [size for size in range(1, axes[axis] + 1) if fits(alone | {axis: size})]

    for free in ([axis for axis in AXES if axis in {*over} and axes[axis] > 1], AXES):
        meshes = [dict(axes) | dict(zip(free, chosen, strict=True)) for chosen in product(*map(choices, free))]
        if fitting := [mesh for mesh in meshes if fits(mesh)]:
            return max(fitting, key=lambda mesh: (math.prod(mesh.values()), *mesh.values()))
    return dict.fromkeys(AXES, 1)


def divisibility_fix(e: "Experiment", axes: Mapping[str, int], over: Sequence[str], name: str, parts: int) -> str:
    """The fix for axes `over` that do not divide the size `name` into `parts`: another mesh, or another size if every
    size that grows with it is free; each with the further changes that it needs."""
    smaller, larger = mesh_to_fit(e, axes, over, name), sizes_to_grow(e, axes)
    fix = f"use --mesh {written(smaller)}{with_changes(sizes_to_grow(e, smaller))}"
    if e.pinned & larger.keys():
        return fix
    if (own := field(name)) in larger:
        fix += f", or a multiple of {parts}, as {own} = {larger[own]}{with_changes(larger, own)}"
    elif larger:
        fix += f", or {assigned(larger)}"
    return fix


def mesh_without(e: "Experiment", axes: Mapping[str, int], *away: str) -> str:
    """Fix text: a mesh that moves the devices of the axes `away` to the batch axis."""
    batch = "fsdp" if e.parallel.row.optimizer else "data"
    devices = math.prod(axes[axis] for axis in (batch, *away))
    full_mesh = {**axes, **dict.fromkeys(away, 1), batch: devices}
    mesh = mesh_to_fit(e, full_mesh, [batch], "dim")
    return f"--mesh {written(mesh)}{with_changes(sizes_to_grow(e, mesh))}"


def split_into(e: "Experiment", axes: Mapping[str, int], microbatches: int) -> str:
    """Fix text: set this number of pipeline microbatches and a batch that they divide; a mesh without a
    pipeline where these are held."""
    split = e.model_copy(update={"train": e.train.model_copy(update={"accumulation": microbatches})})
    larger = sizes_to_grow(split, axes)
    if e.pinned & {"train.accumulation", *larger}:
        return mesh_without(e, axes, "pipeline")
    return f"train.accumulation = {microbatches}{with_changes(larger)}"


def with_changes(changes: Mapping[str, int], *but: str) -> str:
    """Text for a fix: the further changes that it needs."""
    others = {name: size for name, size in changes.items() if name not in but}
    return f" with {assigned(others)}" if others else ""


def assigned(changes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in changes.items())


def field(name: str) -> str:
    """The field of a size."""
    return FIELDS.get(name, f"model.{name}")


def needs(e: "Experiment", axes: Mapping[str, int]) -> Iterator[Need]:
    """Sizes that the mesh divides, and into how many parts."""
    m, parallel = e.model, e.parallel

    def ways(*over: str) -> int:
        return math.prod(axes[axis] for axis in over)

    yield ("batch",), ways(*BATCH) * e.train.accumulation
    if axes["context"] > 1:
        yield ("sequence",), CHUNKS[parallel.context] * axes["context"]
    if parallel.sequence:
        yield ("sequence",), ways("context", "tensor")
    if axes["pipeline"] > 1:
        yield ("layers",), axes["pipeline"] * parallel.virtual_stages
    if m.experts:
        yield ("experts",), axes["expert"]
    for name, value, _, over in m.mesh_sizes(parallel):
        if name == "vocab":
            if value % ways(*over):
                yield ("vocab_multiple",), math.lcm(ways(*over), m.vocab_multiple)
        elif m.has_head_dim:
            yield tuple(name.split(" × ")), ways(*over)
        elif not name.startswith("kv_heads"):  # its kv heads are its heads, which divide its width
            yield ("dim" if "×" in name else name,), ways(*over)


def multiple(factor: int, number: int) -> int:
    """The least multiple of `factor` that is not below `number`."""
    return math.ceil(number / factor) * factor


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`."""
    return next(size for size in range(min(number, most), 0, -1) if number % size == 0)


def _sizes(e: "Experiment") -> dict[str, int]:
    m = e.model
    own = {size.name: size.value for size in m.mesh_sizes(e.parallel)}  # also those that no other family has
    return {
        "layers": m.layers,
        "heads": m.heads,
        "dim": m.dim,
        "hidden": m.hidden,
        "experts": m.experts,
        "vocab_multiple": m.vocab_multiple,
        "positions": m.positions,
        "kv_heads": m.kv_heads,
        "head_dim": m.head_dim,
        **own,
        "batch": e.train.batch,
        "sequence": e.data.sequence,
    }


def _grow(sizes: dict[str, int], name: str, factor: int) -> None:
    sizes[name] = multiple(factor, sizes[name])
