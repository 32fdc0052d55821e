"""Tensor names of a file: their naming, and prefixes of wrappers and outer modules."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from jaxdist.config import ConfigError, Model
from jaxdist.config.plugins import read_each
from jaxdist.config.registry import FAMILIES
from jaxdist.formats.tables import Shape, Table, table_of, table_of_files, tables_of

# Path components added by DDP and FSDP, FSDP1, torch.compile and activation checkpointing.
WRAPPERS = re.compile(r"(?:(?<=^)|(?<=\.))(?:module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
MODEL = ("model", "state_dict", "model_state_dict", "module")  # under which keys training scripts keep its state
CURRENT = "current_model_state"  # of Lightning's WeightAveraging, whose state_dict has averages
NUMBER = re.compile(r"\d+|\{\w+\}")


class Shaped(Protocol):
    """A tensor, whether it was read or not."""

    @property
    def shape(self) -> Shape: ...


def plain(name: str) -> str:
    """A parameter's name without its wrappers'."""
    return WRAPPERS.sub("", name)


def recognized(source: str, entries: Mapping[str, Shaped], model: Model) -> tuple[str, dict[str, str]]:
    """The naming that has most of the given tensors, of two with the same names the one in which they lie as given, and
    its names -> those given. Raises ConfigError where two are one."""
    known = tables_of(model.family)
    found = {naming: inverted(source, entries, naming, model) for naming in known}

    def agreeing(naming: str) -> tuple[int, int]:
        table, names = known[naming], found[naming]
        return sum(map(_kinds(table).__contains__, map(kind, names))), _lying(table, names, entries)

    best = max(known, key=agreeing)
    return best, found[best]


def as_named_by_transformers(family: str, entries: Mapping[str, Shaped]) -> Table:
    """The table with transformers' names in which matrices lie as given: nanoGPT has the same names."""
    known = tables_of(family)
    tables = [table for table in known.values() if _kinds(table) == _kinds(table_of_files(family))]
    return max(tables, key=lambda table: _lying(table, {name: name for name in entries}, entries))


def _lying(table: Table, names: Mapping[str, str], entries: Mapping[str, Shaped]) -> int:
    """Number of matrices of several parameters, with more outputs than inputs, that are laid out as in the table."""
    fused = {kind(row.theirs): row.transpose for row in table.rows if len(row.ours) > 1}
    shapes = [(fused[kind(full)], entries[name].shape) for full, name in names.items() if kind(full) in fused]
    return sum(transpose == (shape[0] > shape[1]) for transpose, shape in shapes if len(shape) == 2)


def kind(name: str) -> str:
    """A name with all its numbers, or the places where a row has them, alike."""
    return NUMBER.sub("#", name)


def _kinds(table: Table) -> set[str]:
    return {kind(row.theirs) for row in table.rows}


def inverted(source: str, names: Iterable[str], naming: str, model: Model) -> dict[str, str]:
    """Full name -> name in the file; a tied head that is there alone is the embedding, of which safetensors may have
    kept that name. Raises ConfigError where two tensors are the same parameter."""
    table, found, entries = table_of(naming, model), dict[str, str](), list(names)
    prefix = outer(map(plain, entries), table)
    for name in entries:
        parameter = table.full_name(plain(name).removeprefix(prefix))
        if parameter in found:
            raise ConfigError(f"{source}: tensors {found[parameter]} and {name} are the same parameter; give each once")
        found[parameter] = name
    embedding = table.rows[0].theirs
    if model.tied and table.head in found and embedding not in found:
        return {embedding: found.pop(table.head)} | found
    return found


def outer(names: Iterable[str], table: Table) -> str:
    """Prefix of a model that is an attribute of a larger module, as Lightning's `model.` or `net.`: the prefix whose
    removal leaves most names in the table, or "" if none gains any."""
    known = _kinds(table)
    found: Counter[str] = Counter({"": 0})
    for name in names:
        parts = name.split(".")
        for i in range(len(parts) - 1):
            if kind(table.full_name(".".join(parts[i:]))) in known:
                found["".join(f"{part}." for part in parts[:i])] += 1
    return max(found, key=lambda prefix: (found[prefix], -len(prefix)))


def renaming(names: Mapping[str, str], naming: str, model: Model) -> Callable[[str], str]:
    """The function from another list's names of the same parameters, an optimizer's or an average's, to full names;
    `names`: full name -> name in the weights' file."""
    table, entries = table_of(naming, model), {plain(name): full for full, name in names.items()}
    return lambda name: entries.get(plain(name)) or table.full_name(plain(name))


def carried(names: Mapping[str, str], naming: str, model: Model) -> dict[str, str]:
    """The part of full name -> name in the file that a naming does not state: prefixes, and a stored tied head."""
    head = table_of(naming, model).head
    return {full: name for full, name in names.items() if full != name or (model.tied and full == head)}


def broken_tables() -> dict[str, ConfigError]:
    """Family -> the error of its tables, of those whose tables cannot be used: `family_of` passes over them."""
    return read_each((name for name, row in FAMILIES.items() if row.tables != {}), tables_of)[1]


def family_of(names: Iterable[str]) -> str:
    """The family whose tensors under some naming, ours among them, the most names are; `unknown` where none is."""
    layered = (re.sub(r"\.\d+\.", ".{layer}.", plain(name), count=1) for name in names)
    entries = [re.sub(r"\.experts\.\d+\.", ".experts.{expert}.", name) for name in layered]

    def score(family: str) -> int:
        """Most names that are in one table of the family. Raises ConfigError where it has no tables."""
        tables = tables_of(family).values()
        known = [{name for row in table.rows for name in (row.theirs, *row.ours)} for table in tables]
        return max(
            sum(not names.isdisjoint((name, table.prefix + name)) for name in entries)
            for table, names in zip(tables, known, strict=True)
        )

    scores, _ = read_each(FAMILIES, score)
    best = max(scores, key=lambda family: scores[family])
    return best if scores[best] else "unknown"
