"""A key mapping from names and shapes alone, to be looked at and edited.

Names that differ in one number are folded into one (`layers.{layer}.mlp`), so that a row stands for all layers. Pairs
whose shapes fit are scored by the words that the names share, rare words for more, and assigned by the largest sum of
scores. Names left over are tried again name by name, and then as arrays that the other side keeps in pieces.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.mappings.mapping import LAYER, KeyMapping, Row, Shapes
from jaxdist.convert.mappings.rows import missing_layers
from jaxdist.convert.mappings.transforms import RESHAPE, fitting

LEAST = 0.2  # of the score of a folded pair; a poorer one may fit better name by name
CLOSE = 0.05  # scores of two candidates that differ by less are a tie
CHUNKS = (2, 3)  # pieces that one array of theirs may be: keys and values, queries with them, gate and up
PIECES = {"query": 0, "key": 1, "value": 2, "gate": 0, "up": 1}  # in the order in which all write them
NUMBERS = 0.2  # what equal numbers add to a score
ORDER = 1e-3  # what the order of appearance adds at most: it decides between equals alone

# Phrases that mean the same, before a name is taken apart. In a name, camel case is already `snake_case`.
PHRASES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"multi_?head(_dot_product)?_attention(_\d+)?|self_att(entio)?n\b", "attention"),
        (r"input_layernorm|layernorm_before|\bln_?1\b|\bnorm_?1\b|layer_?norm_?1\b", "attention norm"),
        (r"post_attention_layernorm|layernorm_after|\bln_?2\b|\bnorm_?2\b|layer_?norm_?2\b", "mlp norm"),
        (r"feed_forward\.w1\b", "mlp gate"), (r"feed_forward\.w3\b", "mlp up"), (r"feed_forward\.w2\b", "mlp down"),
        (r"mlp\.c_proj|mlp\.linear\b|\bfc_?2\b|\blinear_?2\b|\blin2\b|mlp[^.]*\.dense_1\b", "mlp down"),
        (r"\bc_fc\b|\bfc_?1\b|\blinear_?1\b|\blin1\b|mlp[^.]*\.dense_0\b", "mlp up"),
        (r"attn\.c_proj|attention\.c_proj|attn_vec_einsum", "attention out"),
        (r"lm_head|classifier|logits", "head"), (r"gating_einsum", "gate up"), (r"kv_einsum", "key value"),
    )
)  # fmt: skip
LINEN_NORM = re.compile(r"LayerNorm_(\d+)\b")  # as flax counts the modules of a block: the first is attention's
SYNONYMS = {
    word: words[0]
    for words in (
        ("query", "q", "wq"), ("key", "k", "wk"), ("value", "v", "wv"), ("out", "output", "o", "wo"),
        ("attention", "attn"), ("mlp", "ffn", "ffw", "feedforward", "intermediate"),
        ("norm", "layernorm", "ln", "rmsnorm", "batchnorm", "bn", "groupnorm"),
        ("embed", "embedding", "embeddings", "wte", "tok", "token", "tokens", "embedder"),
        ("position", "pos", "positions", "positional", "wpe"), ("patch", "patches"), ("class", "cls"),
        ("downsample", "shortcut", "residual"), ("head", "heads"),
        ("", "proj", "projection", "dense", "linear", "self", "layer", "layers", "block", "blocks", "h", "conv", "c"),
    )
    for word in words
}  # fmt: skip
WEIGHTS = {"kernel", "scale", "embedding", "weight", "w", "gamma"}
BIASES = {"bias", "b", "beta"}
# Whether a leaf's dimensions are in torch's order, where its shape does not show it.
TORCH_ORDER = {"kernel": False, "embedding": True}


class Node(NamedTuple):
    """A name, or names that differ in one number alone and have one shape."""

    template: str
    shape: Shape
    numbers: tuple[int, ...]  # empty for a single name
    names: tuple[str, ...]
    order: float  # where it appears among all, from 0 to 1


class Match(NamedTuple):
    """A row, the transforms that its shapes allow, whether it maps matrices, and its place among theirs."""

    row: Row
    transforms: list[str]
    matrix: bool
    place: int


@dataclass(frozen=True)
class Suggestion:
    """A mapping of what could be paired, the rows to look at with the reason, and the names left over."""

    mapping: KeyMapping
    unsure: dict[Row, str]
    ours_left: tuple[str, ...]
    theirs_left: tuple[str, ...]

    def save(self, path: Path | str) -> None:
        """Write the file to edit; rows that are unsure or left over are comments in it."""
        left = [f"in no row, ours: {name}" for name in self.ours_left]
        left += [f"in no row, theirs: {name}" for name in self.theirs_left]
        self.mapping.save(path, self.unsure, left)


def suggest(ours: Shapes, theirs: Shapes) -> Suggestion:
    """Pair the parameters of two models, given as name -> shape in the order of the model where that is known."""
    found: list[Match] = []
    unsure: dict[Row, str] = {}
    places = {name: i for i, name in enumerate(theirs)}
    left_ours, left_theirs = dict(ours), dict(theirs)
    for fold_ours, fold_theirs, least in ((fold, fold, LEAST), (single, fold, LEAST), (single, single, 0.0)):
        a, b = fold_ours(left_ours), fold_theirs(left_theirs)
        for i, j, doubt in matched(a, b, least):
            transforms = fits(a[i], b[j])
            shape = b[j].shape if transforms == [RESHAPE] else ()
            row = Row(a[i].template, b[j].template, transforms[0], shape)
            found.append(Match(row, transforms, len(b[j].shape) == 2, places[b[j].names[0]]))
            if doubt:
                unsure[row] = doubt
            for left, node in ((left_ours, a[i]), (left_theirs, b[j])):
                for name in node.names:
                    del left[name]
    used: set[Node] = set()
    for group in pieces(fold(left_ours), fold(left_theirs)):
        if group and not used & {node for match in group for node in match[1:]}:
            for match, mine, other in group:
                found.append(match._replace(place=places[other.names[0]]))
                unsure[match.row] = f"one of {len(group)} pieces, in the usual order, which may be another here"
                used |= {mine, other}
    for name in (name for node in used for name in node.names):
        left_ours.pop(name, None)
        left_theirs.pop(name, None)
    rows = settle(sorted(found, key=lambda match: match.place), unsure)
    return Suggestion(KeyMapping(rows, source="suggested mapping"), unsure, tuple(left_ours), tuple(left_theirs))


def fold(shapes: Shapes) -> list[Node]:
    """Names folded over the number that most of them differ in; the outermost where several are equal."""
    groups: dict[tuple[str, Shape, int], list[tuple[int, str]]] = defaultdict(list)
    for name, shape in shapes.items():
        for match in re.finditer(r"\d+", name):
            template = name[: match.start()] + LAYER + name[match.end() :]
            groups[template, shape, template.index(LAYER)].append((int(match[0]), name))
    numbered: dict[str, set[int]] = defaultdict(set)  # the part before a number -> the numbers
    for (template, _, _), members in groups.items():
        numbered[template.partition(LAYER)[0]].update(number for number, _ in members)
    taken: dict[str, Node] = {}
    for (template, shape, _), members in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0][2])):
        members = sorted(members)
        plain = all(template.replace(LAYER, str(number)) == name for number, name in members)  # no leading zeros
        before = template.partition(LAYER)[0]
        complete = plain and not missing_layers(before, numbered[before])
        if len(members) > 1 and complete and not any(name in taken for _, name in members):
            numbers, names = zip(*members, strict=True)
            taken |= dict.fromkeys(names, Node(template, shape, numbers, names, 0.0))
    nodes = [taken.get(name, Node(name, shape, (), (name,), 0.0)) for name, shape in shapes.items()]
    return _ordered(dict.fromkeys(nodes))


def single(shapes: Shapes) -> list[Node]:
    """Every name for itself."""
    return _ordered(Node(name, shape, (), (name,), 0.0) for name, shape in shapes.items())


def _ordered(nodes: Iterable[Node]) -> list[Node]:
    nodes = list(nodes)
    return [node._replace(order=i / len(nodes)) for i, node in enumerate(nodes)]


def fits(a: Node, b: Node) -> list[str]:
    """The transforms that turn a into b, all numbers alike; also where a is stacked over what b is numbered by."""
    if _class(a.template) and _class(b.template) and _class(a.template) != _class(b.template):
        return []
    if a.numbers == b.numbers:
        return fitting(a.shape, b.shape)
    stacked = not a.numbers and b.numbers == tuple(range(len(b.numbers))) and a.shape[:1] == (len(b.numbers),)
    return fitting(a.shape[1:], b.shape) if stacked else []


def pieces(ours: list[Node], theirs: list[Node]) -> Iterator[list[tuple[Match, Node, Node]]]:
    """One array of either side as several of the other: each group pairs the pieces that it may have, if there are any.

    Ours is taken apart along its first axis, or the second where the first are layers; theirs in CHUNKS of its first.
    """
    for one in ours:
        for axis in range(min(2, len(one.shape))):
            piece = one._replace(shape=one.shape[:axis] + one.shape[axis + 1 :])
            stacked = bool(axis)
            several = [node for node in theirs if (one.numbers != node.numbers) == stacked and fits(piece, node)]
            several = alike(piece, several, one.shape[axis])
            yield [(_piece(piece, node, part=i), one, node) for i, node in enumerate(several)]
    for one in theirs:
        for count in CHUNKS if one.shape else ():
            if one.shape[0] % count == 0:
                piece = one._replace(shape=(one.shape[0] // count, *one.shape[1:]))
                several = alike(piece, [node for node in ours if fits(node, piece)], count)
                yield [(_piece(node, piece, chunk=(i, count)), node, one) for i, node in enumerate(several)]


def alike(one: Node, others: list[Node], count: int) -> list[Node]:
    """The `count` others that share most of the name, in the usual order; none where there are fewer."""
    if not 1 < count <= len(others):
        return []
    nearest = np.argsort(-similarity([one], others)[0], kind="stable")[:count]
    return sorted((others[i] for i in nearest), key=lambda node: (rank(node), node.order))


def rank(node: Node) -> int:
    """The place of a piece among those that models keep in one array; a tree's own order is alphabetical."""
    return min((PIECES[word] for word in tokens(node.template) if word in PIECES), default=0)


def _piece(a: Node, b: Node, **which: Any) -> Match:
    transforms = fits(a, b)
    shape = b.shape if transforms == [RESHAPE] else ()
    return Match(Row(a.template, b.template, transforms[0], shape, **which), transforms, False, 0)


def _class(name: str) -> str:
    leaf = name.rpartition(".")[2]
    return "weight" if leaf in WEIGHTS else "bias" if leaf in BIASES else ""


def matched(a: list[Node], b: list[Node], least: float) -> list[tuple[int, int, str]]:
    """Pairs (of a, of b, why it may be wrong) whose scores have the largest sum."""
    possible = np.array([[bool(fits(x, y)) for y in b] for x in a], bool).reshape(len(a), len(b))
    scores = np.where(possible, similarity(a, b), -1.0)
    order = np.array([[1 - abs(x.order - y.order) for y in b] for x in a]).reshape(len(a), len(b))
    found = []
    for i, j in zip(*linear_sum_assignment(scores + ORDER * order, maximize=True), strict=True):
        if possible[i, j] and scores[i, j] >= least:
            found.append((int(i), int(j), rival(scores, int(i), int(j), a, b)))
    return found


def rival(scores: np.ndarray, i: int, j: int, a: list[Node], b: list[Node]) -> str:
    """Why the pair (i, j) may be wrong: another candidate nearly as good, or names without a common word."""
    for others, names, own in ((scores[i], b, j), (scores[:, j], a, i)):
        rivals = [k for k in np.flatnonzero(others >= scores[i, j] - CLOSE) if k != own]
        if rivals:
            return f"{names[rivals[0]].template} fits as well"
    return "" if scores[i, j] > 0 else "the shapes fit, the names have nothing in common"


def similarity(a: list[Node], b: list[Node]) -> np.ndarray:
    """[a, b]: the share of words in common, weighted by how rare they are, and whether the numbers agree in order."""
    words = [[set(tokens(node.template)) for node in nodes] for nodes in (a, b)]
    count = Counter(word for side in words for name in side for word in name)
    total = len(a) + len(b)
    weight = {word: math.log((total + 1) / (n + 0.5)) for word, n in count.items()}
    ranks = [number_ranks(nodes) for nodes in (a, b)]

    def score(i: int, j: int) -> float:
        x, y = words[0][i], words[1][j]
        both = sum(weight[word] for word in x) + sum(weight[word] for word in y)
        common = 2 * sum(weight[word] for word in x & y) / both if both else 0.0
        pairs = list(zip(reversed(ranks[0][i]), reversed(ranks[1][j]), strict=False))
        return common + (NUMBERS * sum(p == q for p, q in pairs) / len(pairs) if pairs else 0.0)

    return np.array([[score(i, j) for j in range(len(b))] for i in range(len(a))]).reshape(len(a), len(b))


def number_ranks(nodes: list[Node]) -> list[list[int]]:
    """Name -> the rank of each of its numbers among the names that differ in numbers alone."""
    found = [list(map(int, re.findall(r"\d+", node.template))) for node in nodes]
    bare = [re.sub(r"\d+", "#", node.template) for node in nodes]
    values: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name, numbers in zip(bare, found, strict=True):
        for place, number in enumerate(numbers):
            values[name, place].add(number)
    return [
        [sorted(values[name, place]).index(number) for place, number in enumerate(numbers)]
        for name, numbers in zip(bare, found, strict=True)
    ]


def tokens(name: str) -> list[str]:
    """The words of a name, each by its first synonym; the class of its leaf among them, numbers left out."""
    text = LINEN_NORM.sub(lambda m: "mlp.norm" if int(m[1]) else "attention.norm", name.replace(LAYER, "0"))
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()
    for pattern, words in PHRASES:
        text = pattern.sub(words, text)
    leaf = _class(name)
    parts = [part for part in re.split(r"[^a-z]+", text) if part and part not in ("weight", "kernel")]
    return [word for part in parts if (word := SYNONYMS.get(part, part))] + ([leaf] if leaf else [])


def settle(found: list[Match], unsure: dict[Row, str]) -> tuple[Row, ...]:
    """Choose among transforms that shapes allow: by what other matrices of the same leaf show, else by its name."""
    shown: dict[str, set[bool]] = defaultdict(set)  # leaf -> whether its matrices stay as they are
    for match in found:
        if len(match.transforms) == 1 and match.matrix:
            shown[_leaf(match.row)].add(match.transforms == ["same"])
    rows = []
    for row, transforms, _, _ in found:
        if len(transforms) > 1:
            known, default = shown[_leaf(row)], TORCH_ORDER.get(_leaf(row))
            kept = known == {True} or (known != {False} and default is True)
            options = [name for name in transforms if (name == "same") == kept] or transforms
            doubt = unsure.pop(row, "")
            row = row._replace(transform=options[0])
            if kept != default or len(known) == 2 or len(options) > 1:
                doubt = doubt or f"the shape allows {' and '.join(transforms)}"
            if doubt:
                unsure[row] = doubt
        rows.append(row)
    return tuple(rows)


def _leaf(row: Row) -> str:
    return row.ours.rpartition(".")[2]
