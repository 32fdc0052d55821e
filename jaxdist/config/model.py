"""The model section of an experiment, one class per family."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from jaxdist.config.errors import ConfigError, OtherShapes
from jaxdist.config.section import Positive, Section, fallback

if TYPE_CHECKING:
    from jaxdist.config.experiment import Experiment
    from jaxdist.config.parallel import Parallel


class Size(NamedTuple):
    """A size of a model that mesh axes divide."""

    name: str
    """Its field, or fields as `heads × head_dim`."""
    value: int
    parameter: str
    """A parameter with a dimension of this size."""
    axes: tuple[str, ...]


class Model(Section):
    """Fields of every model. `input_kind` is the kind of its training data, `sample_unit` what rows of a batch are.

    `free`: fields in which a model may differ from weights of it: how they were drawn and are trained.
    """

    input_kind: ClassVar[Literal["tokens", "images"]] = "tokens"
    sample_unit: ClassVar[str] = "sequences"
    free: ClassVar[frozenset[str]] = frozenset({"init_std"})

    if TYPE_CHECKING:  # fields, properties or class variables of a family's own class

        @property
        def family(self) -> str: ...
        @property
        def layers(self) -> int: ...
        @property
        def dim(self) -> int: ...
        @property
        def vocab(self) -> int: ...
        @property
        def tied(self) -> bool: ...

    @fallback
    def heads(self) -> int:
        """Query heads, H; 0: no attention."""
        return 0

    @fallback
    def kv_heads(self) -> int:
        """Key and value heads, K."""
        return self.heads

    @fallback
    def head_dim(self) -> int:
        """Width of one head; 0: no attention."""
        return self.dim // self.heads if self.heads else 0

    @fallback
    def hidden(self) -> int:
        """Width of the MLP, F; 0: none."""
        return 0

    @fallback
    def window(self) -> int:
        """Sliding attention window in tokens; 0: none."""
        return 0

    @fallback
    def positions(self) -> int:
        """Longest sequence in tokens; 0 for models of images."""
        return 0

    @fallback
    def qkv_bias(self) -> bool:
        """Whether query, key and value projections have biases."""
        return False

    @fallback
    def mlp_bias(self) -> bool:
        """Whether the MLP has biases."""
        return False

    @fallback
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalized."""
        return False

    @fallback
    def gelu(self) -> str:
        """Variant of GELU, `tanh` or `exact`; empty: the model has no such choice."""
        return ""

    @fallback
    def experts(self) -> int:
        """Experts of each block, E; 0: none."""
        return 0

    @fallback
    def capacity(self) -> float:
        """Most tokens of an expert, in multiples of its even share; 0: no limit."""
        return 0.0

    @fallback
    def balance(self) -> float:
        """Weight of a load-balance loss over each microbatch; 0: none."""
        return 0.0

    @fallback
    def vocab_multiple(self) -> int:
        """Number of which the rows of the embedding and the output head are a multiple."""
        return 1

    @property
    def has_head_dim(self) -> bool:
        """Whether the width of a head is a field of its own, not the model's width divided by the number of heads."""
        return "head_dim" in type(self).model_fields

    @property
    def vocab_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab

    def check(self, e: "Experiment") -> None:
        """Raises ValueError for settings of other sections that do not go with the model."""

    def check_mesh(self, e: "Experiment", axes: Mapping[str, int]) -> None:
        """Raises ConfigError where these sizes of the mesh axes do not divide what they must."""

    @property
    def vocabulary(self) -> tuple[int, int] | None:
        """Tokens, and rows of the embedding; None for models of images."""
        return None

    def without_padding(self) -> Self:
        """The model, its vocabulary without padding."""
        return self

    def mesh_sizes(self, parallel: "Parallel") -> Iterator[Size]:
        """Sizes that mesh axes divide; batch, sequences and layers apart."""
        yield from ()

    @property
    def mixes_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its microbatch."""
        return False

    def input_shape(self, sequence: int) -> tuple[int, ...]:
        """Shape of one row of a batch, where sequences have `sequence` tokens."""
        return (sequence,)

    def describe(self) -> str:
        """The sizes of the model in a few words."""
        return f"{self.layers} layers, D {self.dim}, V {self.vocab}"

    def describe_rows(self, sequence: int) -> str:
        """Kind and size of the rows of a batch."""
        return f"sequences of {sequence} tokens"

    norm_eps: Positive = 1e-5
    """Term added to the variance (LayerNorm, batch norm) or mean square (RMSNorm)."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; residual projections are divided by a further sqrt(2L). In a ResNet it
    is the output head's, and convolutions are scaled by their fan-out (arXiv:1502.01852)."""


Shape = tuple[int, ...]


def held_by_weights(model: Model) -> set[str]:
    """Fields in which a model cannot differ from weights of it: all but its family's `free` ones."""
    return {*type(model).model_fields} - model.free


def model_differences(wanted: Model, found: Model) -> dict[str, tuple[Any, Any]]:
    """Field -> (its value in `wanted`, in `found`), for every field in which the weights of one do not fit the other;
    `family` alone where that differs. A vocabulary may be larger than that of the weights, by new tokens."""
    here, there = wanted.model_dump(), found.model_dump()
    if here["family"] != there["family"]:
        return {"family": (here["family"], there["family"])}
    held = held_by_weights(wanted) - ({"vocab"} if here.get("vocab", 0) > there.get("vocab", math.inf) else set())
    return {name: (here[name], there[name]) for name in sorted(held) if here[name] != there[name]}


def same_model(wanted: Model, found: Model, source: str, fix: str = "") -> None:
    """Raises ConfigError naming every field in which `wanted` is not the model of `source`, and the `fix`."""
    if not (different := model_differences(wanted, found)):
        return
    mine = ", ".join(f"model.{name} = {here!r}" for name, (here, _) in different.items())
    theirs = ", ".join(repr(there) for _, there in different.values())
    assignments = (f"model.{name} = {there!r}" for name, (_, there) in different.items())
    fix = fix or f"set {', '.join(assignments)}"
    raise ConfigError(f"{mine}, but {source} holds another model, with {theirs}; {fix}")


def check_shapes(
    source: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape], names: Mapping[str, str] | None = None
) -> None:
    """Raises ConfigError naming the first tensor of `source` that is transposed, or OtherShapes naming the first one
    that is missing, unexpected or of another shape, and the layers without any tensor. `names`: name -> that
    in the file, where they differ."""
    in_file = names or {}
    bad = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)]
    turned = [name for name in bad if len(found.get(name, ())) == 2 and wanted.get(name) == found[name][::-1]]
    if turned:
        name, others = turned[0], len(bad) - len(turned)
        more = f", and so are {len(turned) - 1} more" if len(turned) > 1 else ""
        more += f"; {others} others differ in name or shape" if others else ""
        raise ConfigError(
            f"{source}: tensor {in_file.get(name, name)} is transposed: {tuple(found[name])} there, "
            f"{tuple(wanted[name])} in the model{more}; save its transpose (tensor.T), as torch's Linear has (outputs, "
            "inputs)"
        )
    if bad:
        there, here = (str(tuple(shapes[bad[0]])) if bad[0] in shapes else "absent" for shapes in (found, wanted))
        more = f" ({len(bad) - 1} more differ)" if len(bad) > 1 else ""
        layers = sorted(_layers(wanted) - _layers(found))
        lacking = "".join(f"{', ' if i else ''}{name}{number}" for i, (name, number) in enumerate(layers[:5]))
        more += f"; it has nothing of {lacking}{', ...' if layers[5:] else ''}" if layers else ""
        fix = "give weights that belong to their config"
        if wanted.keys() <= found.keys() and not {*bad} & wanted.keys():
            fix = f"remove {'them' if more else 'it'} from the file, or {fix}"
        raise OtherShapes(
            f"{source}: tensor {in_file.get(bad[0], bad[0])} is {there} there, and {here} in the model{more}; {fix}"
        )


def _layers(names: Iterable[str]) -> set[tuple[str, int]]:
    """The numbered parts of a model, by the first number in its tensors' names: the text before it, and the number."""
    matches = (re.match(r"(\D*)(\d{1,9})\.", name) for name in names)
    return {(match[1], int(match[2])) for match in matches if match}
