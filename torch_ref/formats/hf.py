"""Weights of a source of any kind: the neutral plan followed with torch's tensors."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from jaxdist.config import Model, same_model
from jaxdist.formats.finite import BadValues
from jaxdist.formats.headers import Header
from jaxdist.formats.opening import companions_by, described_by
from jaxdist.formats.plan import plan_of, untied
from jaxdist.formats.sources import Found, found
from jaxdist.formats.tables import EXPERTS, Stored, stored
from torch_ref.formats.arrays import to_torch
from torch_ref.formats.finite import bad_values
from torch_ref.formats.reader import READER
from torch_ref.parallel.weights import VOCABULARY


class Weights:
    """The tensors of a source of any kind under torch_ref's names, read one at a time."""

    def __init__(self, path: Path, wanted: Model, source: Found | None = None):
        """`source`: of `path`, where it is open. Raises ConfigError when it cannot be read or is of another model than
        `wanted`."""
        source = source or found(path, READER)
        self.path, self.leaves, self.model = source.path, source.leaves, source.model(wanted)
        same_model(wanted, self.model, str(self.path))
        self.tokens = _without_padding(self.model, wanted)
        own = READER.shapes(self.model)
        self.headers = {name: Header(leaf.shape, leaf.dtype.name) for name, leaf in self.leaves.items()}
        self.plan = plan_of(str(self.path), self.headers, self.model, own)
        self.bad: dict[str, BadValues] = {}  # of the tensors read so far, by their names
        self.atoms, self.targets = self.plan.atoms(), stored("torch_ref", self.model, own)

    def check(self) -> None:
        """Raises ConfigError for tensors that are missing, unexpected, of another shape or dtype, and for a tied head
        that differs from the embedding."""
        names, head = self.plan.names, self.plan.parts.head
        if head and not self.leaves[names[head]].equals(self.leaves[names[self.plan.embedding]]):
            raise untied(str(self.path), head)
        self.plan.check(str(self.path), self.headers)

    def read(self, name: str) -> Tensor:
        """The tensor that torch_ref calls `name`, in its layout and the file's dtype. Raises ConfigError."""
        target = self.targets[name]
        places = [self.atoms[atom] for atom in target.atoms]
        sources = {tensor.name: self._theirs(self.plan.names[tensor.name]) for tensor, _ in places}
        for source, theirs in sources.items():
            if found := bad_values(source, theirs):
                self._note(source, found)
        parts = [self._part(sources[tensor.name], tensor, i, target) for tensor, i in places]
        full = torch.stack(parts) if EXPERTS in name else parts[0]
        return full[: self.tokens] if name in VOCABULARY else full

    def _note(self, source: str, found: BadValues) -> None:
        """Keep what was found in a tensor, or in the pieces of the file's arrays that it is made of, by the names
        there."""
        name = self.plan.names[source]
        if not (pieces := self.leaves[name].pieces):
            self.bad[name] = found
        for piece, leaf in pieces.items():
            if of_piece := bad_values(piece, to_torch(leaf.read())):
                self.bad[piece] = of_piece

    def _part(self, theirs: Tensor, tensor: Stored, atom: int, target: Stored) -> Tensor:
        """One atom of a tensor of the folder, in the layout of `target`."""
        row, several = tensor.row, len(tensor.row.ours)
        if EXPERTS in row.ours[0] and not row.by_expert:
            experts = len(tensor.atoms) // several
            theirs, atom = theirs[atom % experts], atom // experts
        if row.interleaved:  # (heads, pairs, 2) of the outputs -> (heads, 2, pairs)
            theirs = theirs.unflatten(0, (-1, self.model.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if row.transpose != target.row.transpose:
            theirs = theirs.t()
        return theirs if several == 1 else theirs.chunk(several)[atom]

    def _theirs(self, name: str) -> Tensor:
        return to_torch(self.leaves[name].read())


def _without_padding(model: Model, wanted: Model) -> int | None:
    """Number of the vocabulary's rows to read; None for all, where both models have the same, padding too."""
    return None if model.vocabulary == wanted.vocabulary else model.vocab


describe = partial(described_by, READER)
lies_beside = partial(companions_by, READER)
