"""Layouts of one parameter in JAX ("ours") and in torch ("theirs"): a table of invertible array transforms.

Shape letters: I inputs, O outputs, D model, H heads, K kv heads, C head_dim, and the window W×H of a convolution.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxdist.convert.mappings.atoms import Shape


class Transform(NamedTuple):
    """`axes[i]` are the axes of ours that, merged in this order, are axis i of theirs; None: all as they are.

    With `pairs` our last axis counts as two, [C/2, 2]: rotary embeddings turn numbers that are neighbours in ours, and
    half a head apart in theirs. Those that are not `suggested` fit shapes by chance more often than on purpose.

    `output` says how the output of a module with such a kernel differs: not at all, by `heads` that are an axis of
    their own in ours, or by `channels` that come last in ours and after the batch in theirs.
    """

    axes: tuple[tuple[int, ...], ...] | None
    output: str = "same"
    pairs: bool = False
    suggested: bool = True

    def seen(self, shape: Shape) -> Shape:
        """Our shape as `axes` count it."""
        return (*shape[:-1], shape[-1] // 2, 2) if self.pairs and shape else shape


SAME = "same"
RESHAPE = "reshape"  # the one whose result does not follow from our shape: its row says it
TRANSFORMS = {
    SAME: Transform(None),
    "transpose": Transform(((1,), (0,))),  # Dense (I,O) <-> Linear (O,I)
    "conv1d": Transform(((2,), (1,), (0,)), "channels"),  # (W,I,O) <-> (O,I,W)
    "conv2d": Transform(((3,), (2,), (0,), (1,)), "channels"),  # (H,W,I,O) <-> (O,I,H,W)
    "heads_out": Transform(((1, 2), (0,)), "heads"),  # DenseGeneral (D,H,C) <-> Linear (H·C,D)
    # The same, where ours rotates neighbouring numbers.
    "heads_out_pairs": Transform(((1, 3, 2), (0,)), pairs=True, suggested=False),
    "heads_bias": Transform(((0, 1),)),  # its bias (H,C) <-> (H·C,)
    "heads_in": Transform(((2,), (0, 1))),  # DenseGeneral (H,C,D) <-> Linear (D,H·C)
    "outputs_first": Transform(((0, 1), (2,)), suggested=False),  # (H,C,D) <-> Linear (H·C,D)
    "outputs_grouped": Transform(((0, 1, 2), (3,)), suggested=False),  # (K,H/K,C,D) <-> Linear (H·C,D)
    "inputs_last": Transform(((0,), (1, 2)), suggested=False),  # (D,H,C) <-> Linear (D,H·C)
    "heads_first": Transform(((0, 2), (1,)), "heads"),  # an einsum's (H,D,C) <-> Linear (H·C,D)
    RESHAPE: Transform(None, suggested=False),
}


def result(name: str, shape: Shape) -> Shape | None:
    """The shape of theirs for one of ours; None where ours has another number of axes than the transform, or an odd
    last one that should be pairs."""
    transform = TRANSFORMS[name]
    if transform.axes is None:
        return shape
    if transform.pairs and (not shape or shape[-1] % 2):
        return None
    axes, shape = transform.axes, transform.seen(shape)
    if sorted(axis for group in axes for axis in group) != list(range(len(shape))):
        return None
    return tuple(math.prod(shape[axis] for axis in group) for group in axes)


def fitting(ours: Shape, theirs: Shape) -> list[str]:
    """Names of the suggested transforms that turn one shape into the other; `reshape` only where axes of size 1
    differ."""
    fits = [name for name, t in TRANSFORMS.items() if t.suggested and result(name, ours) == theirs]
    units = [tuple(size for size in shape if size != 1) for shape in (ours, theirs)]
    return fits or ([RESHAPE] if units[0] == units[1] else [])


def as_ours(name: str, tensor: np.ndarray, shape: Shape) -> np.ndarray:
    """Their tensor as ours of this shape (`Transform.seen`): a view of a tensor that is contiguous."""
    axes, shape = TRANSFORMS[name].axes, TRANSFORMS[name].seen(shape)
    if axes is None:
        return tensor.reshape(shape)
    order = [axis for group in axes for axis in group]
    return tensor.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))


def output_to_theirs(kind: str, array: np.ndarray) -> np.ndarray:
    """The output of a module of ours, batch first, as theirs lays it out. `kind` is a `Transform.output`."""
    if kind == "heads":
        return array.reshape(*array.shape[:-2], -1)
    return np.moveaxis(array, -1, 1) if kind == "channels" else array
