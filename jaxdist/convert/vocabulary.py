"""The vocabulary of a content made larger, by new tokens or padding, or its padding taken off."""

from dataclasses import replace

import numpy as np

from jaxdist.config import EMA, Model
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, entries_of, with_vocabulary
from jaxdist.runs.display import say

MEANS = (PARAMETERS, EMA)  # groups whose new rows are the mean of the others; of moments they are zero


def exported(content: Content) -> Content:
    """Without padding, as others expect it."""
    return resized(content, content.experiment.model.without_padding())


def resized(content: Content, model: Model) -> Content:
    """`content` with the vocabulary of `model`, which is otherwise the same: new tokens and padding are the mean of the
    tokens that there are, and have no moments yet."""
    own = content.experiment.model
    if not own.vocabulary or not model.vocabulary:
        return content
    experiment = with_vocabulary(content.experiment, model.vocab, model.vocab_multiple)
    if own.vocabulary == model.vocabulary:
        return replace(content, experiment=experiment)
    if (new := model.vocab - own.vocab) > 0:
        say(f"model.vocab = {model.vocab}: {new} new tokens begin as the mean of the {own.vocab} that there are")
    groups, axes = dict[str, Leaves](), _axes(content)
    for group, leaves in content.groups.items():
        sizes, mean = (own.vocab, model), group in MEANS
        changed = {name: _resized(leaves[name], axis, sizes, mean) for name, axis in axes[group].items()}
        groups[group] = {**leaves, **changed}
    return replace(content, experiment=experiment, groups=groups)


def _axes(content: Content) -> dict[str, dict[str, int]]:
    """Group -> tensor -> which of its axes is the vocabulary, of tensors that have it: the one that grows with it."""
    model = content.experiment.model
    larger = with_vocabulary(content.experiment, model.vocab + model.vocab_multiple, model.vocab_multiple)
    found: dict[str, dict[str, int]] = {}
    for group, leaves in content.groups.items():
        here, there = (entries_of(content.naming, e, group) for e in (content.experiment, larger))
        pairs = {name: zip(here[name].shape, there[name].shape, strict=True) for name in leaves}
        grows = {name: [axis for axis, (a, b) in enumerate(pair) if a != b] for name, pair in pairs.items()}
        found[group] = {name: axes[0] for name, axes in grows.items() if axes}
    return found


def _resized(leaf: Leaf, axis: int, sizes: tuple[int, Model], mean: bool) -> Leaf:
    """A tensor with tokens along `axis`: their number in `sizes`, and rows as the model needs."""
    tokens, model = sizes
    shape = (*leaf.shape[:axis], model.vocab_rows, *leaf.shape[axis + 1 :])

    def read() -> np.ndarray:
        resized = np.empty(shape, leaf.dtype)
        before, after = (np.moveaxis(array, axis, 0) for array in (leaf.read(), resized))
        before = before[:tokens]
        after[: len(before)] = before[: len(after)]
        after[len(before) :] = before.mean(0, dtype=np.float64).astype(leaf.dtype) if mean else 0
        return resized

    return Leaf(shape, leaf.dtype, read, besides=leaf.bytes + leaf.besides)
