"""The plan of a source of weights: which of its tensors is which parameter, which are none, and what does not fit.

Both sides follow it, so that what one takes the other takes, and what one refuses the other refuses in the same words.
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxdist.config import ConfigError, Model, check_shapes
from jaxdist.formats.headers import Header
from jaxdist.formats.naming import Shaped, kind, recognized
from jaxdist.formats.tables import EXPERTS, STACKED, TORCH_REF, TURNED, Atom, Shape, Stored, stored, table_of

WEIGHTS = ("float64", "float32", "float16", "bfloat16")  # others hold quantized weights, whose scales lie elsewhere
COUNTED, COUNTS = "num_batches_tracked", ("int64", "int32")  # of batches, in torch and in JAX

TITAN_MIXTURE = re.compile(r"\.moe\.(experts\.w\d|router\.gate)")


class Parts(NamedTuple):
    """The names of a naming's tensors by what they are. `head` is that of a stored copy of the tied embedding."""

    parameters: list[str]
    buffers: list[str]
    head: str | None


def parted(naming: str, model: Model, names: Iterable[str]) -> Parts:
    """Parameters, buffers that the model makes anew, and a tied head apart."""
    table = table_of(naming, model)
    entries = list(names)
    buffers = [name for name in entries if table.ignored.search(name)]
    head = table.head if model.tied and table.head in entries else None
    return Parts([name for name in entries if name not in {*buffers, head}], buffers, head)


def embedding(naming: str, model: Model) -> str:
    """A naming's name of the embedding, of which a tied head is a copy."""
    return table_of(naming, model).rows[0].theirs


def untied(source: str, head: str) -> ConfigError:
    """The error where a tied head that is stored holds other numbers than the embedding."""
    return ConfigError(f"{source}: tie_word_embeddings is true, but {head} differs from the embedding; set it to false")


def check_tensors(
    source: str, found: Mapping[str, Header], wanted: Mapping[str, Shape], names: Mapping[str, str]
) -> None:
    """Raises ConfigError naming a tensor of `source` that is missing, unexpected, of another shape, or no weights.
    `names`: name -> that in the source, where they differ."""
    if name := next(filter(TITAN_MIXTURE.search, found), None):
        raise ConfigError(
            f"{source}: {name} is of torchtitan's mixtures, whose layout is not supported; export it by torchtitan's "
            "scripts/checkpoint_conversion/convert_to_hf.py, put the model's config.json into its output folder, and "
            "give that folder"
        )
    check_shapes(source, {name: header.shape for name, header in found.items()}, wanted, names)
    for name, header in found.items():
        if header.dtype not in (COUNTS if name.endswith(COUNTED) else WEIGHTS):
            raise ConfigError(f"{source}: tensor {names.get(name, name)} is {header.dtype}; give {', '.join(WEIGHTS)}")


class Plan(NamedTuple):
    """`names`: name in the naming -> in the source; `tensors`: each with the atoms that it holds."""

    names: Mapping[str, str]
    parts: Parts
    tensors: Mapping[str, Stored]
    embedding: str

    def atoms(self) -> dict[Atom, tuple[Stored, int]]:
        """Atom -> the tensor that holds it, and its number in that tensor."""
        return {atom: (tensor, i) for tensor in self.tensors.values() for i, atom in enumerate(tensor.atoms)}

    def check(self, source: str, headers: Mapping[str, Header]) -> None:
        """Raises ConfigError as `check_tensors` does. `headers` by name in the source."""
        found = {name: headers[self.names[name]] for name in self.parts.parameters}
        check_tensors(source, found, {name: tensor.shape for name, tensor in self.tensors.items()}, self.names)


def plan_of(source: str, entries: Mapping[str, Shaped], model: Model, shapes: Mapping[str, Shape]) -> Plan:
    """The plan of a source with these tensors, by whose names their naming is recognized.

    `shapes`: those of the model's parameters as jaxdist has them. Raises ConfigError where two are one.
    """
    naming, found = recognized(source, entries, model)
    return Plan(found, parted(naming, model, found), stored(naming, model, shapes), embedding(naming, model))


def stacked(model: Model, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The shapes of jaxdist's parameters, given those of torch_ref's: all layers in one, matrices (in, out)."""
    rows = {kind(row.theirs): row for row in table_of(TORCH_REF, model).rows}
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        row, (module, _, _) = rows[kind(name)], name.rpartition(".")
        depth = int(EXPERTS in row.ours[0])
        matrix = shape[depth:]
        if row.transpose:
            matrix = tuple(matrix[axis] for axis in TURNED[len(matrix)])
        if row.stacked:
            module = STACKED + module.split(".", 2)[2]
        layers = (model.layers,) if row.stacked else ()
        found[f"{module}.{row.ours[0].rpartition('.')[2]}"] = (*layers, *shape[:depth], *matrix)
    return found
