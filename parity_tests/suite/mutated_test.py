"""Mutated metadata of checkpoints, through both sides: each is read as before, or refused by name by both.

Mutations are drawn from seeds: bytes flipped or truncated, keys missing, duplicated or swapped, absurd numbers, other
types. None may cause another error, a hang, or an allocation for sizes that are only claimed.
"""

import gc
import json
import pickle
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

from jaxdist.config import ConfigError, Model
from jaxdist.config.experiment import MOST_PROBLEMS
from jaxdist.convert.entries import param_specs_of
from jaxdist.convert.kinds import deepspeed_folders_test as deepspeed
from jaxdist.convert.kinds import deepspeed_universal_test as universal
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of
from jaxdist.runs.checkpoints import MANIFEST
from jaxdist.training import optim, orbax_io
from parity_tests.suite.source_kinds_test import LLAMA, SOURCES, as_it_is
from parity_tests.suite.sources_test import bits, read_by_jaxdist, read_by_torch_ref
from parity_tests.validation.mutations import damaged, mutated
from torch_ref.training.checkpoint import read as full_state

SECONDS = 5.0  # CPU seconds per reading
MEMORY = 1_000_000  # KiB by which the process may grow in total

Mutate = Callable[[bytes, Random], bytes]


def of_json(content: bytes, random: Random) -> bytes:
    changed = mutated(json.loads(content), random)
    return json.dumps(changed, default=repr, skipkeys=True).encode()


def of_pickle(content: bytes, random: Random) -> bytes:
    """Mutate torch's index, whose classes refuse to save some mutations."""
    while True:
        with suppress(AttributeError, RuntimeError):
            return pickle.dumps(mutated(pickle.loads(content), random))


def of_torch(file: Path, random: Random) -> bytes:
    with deepspeed.deepspeed():
        tree = torch.load(file, weights_only=False)
        torch.save(mutated(tree, random), file)
    return file.read_bytes()


def of_header(content: bytes, random: Random) -> bytes:
    """Mutate llm.c's header of 256 numbers of 4 bytes."""
    at = 4 * random.randrange(12)
    number = random.choice((-1, 0, 1, 3, 5, 6, 2**16, 2**31 - 1, -(2**31), random.randrange(2**31)))
    return content[:at] + number.to_bytes(4, "little", signed=True) + content[at + 4 :]


class Case(NamedTuple):
    """One mutated file at a time: those of `source` (a name in SOURCES, or a function that writes one) that match
    `pattern`.

    `kept`: whether numbers read from the mutated source must equal those of the intact one.
    """

    source: str | Callable[[Path], Path]
    pattern: str
    mutate: Mutate | Callable[[Path, Random], bytes]
    kept: bool = False
    model: Model = LLAMA


def head(content: bytes, random: Random) -> bytes:
    return damaged(content, random, within=1024)


def universal_2(folder: Path) -> Path:
    return universal.universal(folder / "run", deepspeed.Trained(folder))


def universal_3(folder: Path) -> Path:
    return universal.universal_3(folder / "run", deepspeed.Trained(folder))


ORBAX, CONVERTED = "a run of jaxdist, qwen2", "Orbax by convert, gpt2"
CASES = {
    "_METADATA": Case(ORBAX, "parameters/_METADATA", of_json, kept=True),
    "_METADATA, bytes": Case(ORBAX, "parameters/_METADATA", damaged, kept=True),
    "_sharding": Case(ORBAX, "*/_sharding", of_json, kept=True),
    "the experiment's metadata": Case(ORBAX, "experiment/metadata", of_json, kept=True),
    "manifest.ocdbt": Case(ORBAX, "parameters/manifest.ocdbt", damaged, kept=True),
    "OCDBT's files": Case(ORBAX, "parameters/d/*", damaged),
    "manifest.ocdbt of a process": Case(ORBAX, "*/ocdbt.process_0/manifest.ocdbt", damaged, kept=True),
    "array_metadatas": Case(ORBAX, "*/array_metadatas/*", of_json, kept=True),
    "array_metadatas, bytes": Case(ORBAX, "*/array_metadatas/*", damaged, kept=True),
    "_sharding, bytes": Case(ORBAX, "*/_sharding", damaged, kept=True),
    "_CHECKPOINT_METADATA": Case(ORBAX, "_CHECKPOINT_METADATA", of_json, kept=True),
    "_METADATA of the optimizer": Case(ORBAX, "optimizer/_METADATA", of_json, kept=True),
    "_METADATA of the optimizer, bytes": Case(ORBAX, "optimizer/_METADATA", damaged, kept=True),
    "OCDBT's files of the optimizer": Case(ORBAX, "optimizer/manifest.ocdbt optimizer/d/*", damaged, kept=True),
    "_METADATA by convert": Case(CONVERTED, "*/_METADATA", of_json, kept=True),
    ".zarray": Case(CONVERTED, "parameters/*/.zarray", of_json),
    ".zarray, bytes": Case(CONVERTED, "parameters/*/.zarray", damaged),
    ".zarray of the optimizer": Case(CONVERTED, "optimizer/*/.zarray", of_json, kept=True),
    "ZeRO 2": Case("ZeRO 2", "*.pt", of_torch),
    "ZeRO 2, bytes": Case("ZeRO 2", "*.pt", damaged),
    "ZeRO 3": Case("ZeRO 3, the folder around", "*/*.pt", of_torch),
    "ZeRO 3, latest": Case("ZeRO 3, the folder around", "latest", damaged, kept=True),
    "without ZeRO": Case("DeepSpeed without ZeRO", "*.pt", of_torch),
    "universal": Case(universal_2, "*.pt zero/optimizer_state.pt zero/*norm*/*.pt", of_torch),
    "universal of stage 3": Case(universal_3, "*.pt zero/optimizer_state.pt", of_torch),
    "Lightning": Case("Lightning", ".", of_torch),
    "Lightning, bytes": Case("Lightning", ".", damaged),
    ".metadata": Case("a run of torch_ref", ".metadata", of_pickle),
    ".metadata, bytes": Case("a run of torch_ref", ".metadata", damaged),
    ".metadata of torchtitan": Case("torchtitan", ".metadata", of_pickle),
    "llm.c": Case("llm.c", ".", of_header),
    "llm.c, bytes": Case("llm.c, bfloat16", ".", head),
}  # fmt: skip
QUICK, LONG = 2, 600


class Intact(NamedTuple):
    path: Path
    files: list[Path]
    model: Model
    found: list[Any]
    """By each of READERS: tensors by name, or the message of one that does not take such a source."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Intact]:
    made: dict[str, Intact] = {}

    def named(name: str) -> Intact:
        if name not in made:
            case, folder = CASES[name], tmp_path_factory.mktemp("mutated")
            write: Any
            write, model = (case.source, LLAMA) if callable(case.source) else SOURCES[case.source][1:3]
            path = write(folder) if callable(case.source) else write(folder, as_it_is)
            path = alone(path)
            files = [path] if case.pattern == "." else sorted(f for p in case.pattern.split() for f in path.glob(p))
            intact = Intact(path, files, model, [])
            made[name] = intact._replace(found=[outcome(read, intact) for read in READERS])
        return made[name]

    return named


def alone(path: Path) -> Path:
    """A run's checkpoint without its manifest, like another program's; other sources unchanged."""
    if not (path / "checkpoints").exists():
        return path
    (checkpoint,) = (folder for folder in (path / "checkpoints").iterdir() if folder.is_dir())
    (checkpoint / MANIFEST).unlink()
    return checkpoint.rename(path.parent / checkpoint.name)


def trained_by_jaxdist(path: Path, model: Model) -> dict[str, np.ndarray]:
    """Content with the optimizer, as `convert` reads it."""
    content = KINDS[kind_of(path)].format.read_content(path, experiment_for(model.model_dump(), "test"))
    return {f"{kind}/{name}": leaf.read() for kind, group in content.groups.items() for name, leaf in group.items()}


def resumed_by_jaxdist(path: Path, model: Model) -> dict[str, np.ndarray]:
    """The state as a resume restores it, by Orbax; empty for other kinds of checkpoints."""
    if kind_of(path) != "orbax":
        return {}
    param_specs, one = param_specs_of(model), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weights = {name: jax.ShapeDtypeStruct(spec.shape, np.float32) for name, spec in param_specs.items()}
    trained = {name: weight for name, weight in weights.items() if not param_specs[name].statistic}
    chain = optim.optimizer(experiment_for(model.model_dump(), "test").optimizer, 1, param_specs)
    wanted = {"parameters": weights, "optimizer": jax.eval_shape(chain.init, trained)}
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), wanted)
    found = orbax_io.restore(path, **placed)
    leaves = jax.tree_util.tree_leaves_with_path({item: found[item] for item in wanted})
    return {jax.tree_util.keystr(place): np.asarray(array) for place, array in leaves}


def resumed_by_torch_ref(path: Path, model: Model) -> Any:
    """The state as torch reads it, all of it by one process."""
    return full_state(path)


READERS = (read_by_jaxdist, read_by_torch_ref, trained_by_jaxdist, resumed_by_jaxdist)


def outcome(read: Callable[[Path, Model], Any], intact: Intact) -> Any:
    """Content read from a source, or the message of a refusal."""
    start = time.process_time()
    try:
        return read(intact.path, intact.model)
    except ConfigError as error:
        return str(error)
    finally:
        assert time.process_time() - start < SECONDS


def check(case: Case, intact: Intact, seed: str) -> bool:
    """Whether any reader refuses a mutated source; both sides must agree."""
    ours, theirs, *_ = found = [outcome(read, intact) for read in READERS]
    assert isinstance(ours, str) == isinstance(theirs, str), (seed, ours, theirs)
    readers = [(now, before) for now, before in zip(found, intact.found, strict=True) if isinstance(before, dict)]
    refusals = [now for now, _ in readers if isinstance(now, str)]
    for message in refusals:
        assert any(path.name in message for path in (intact.path, *intact.files)), (seed, message)
        lines = message.splitlines()
        assert len(lines) <= MOST_PROBLEMS + 1 and max(map(len, lines)) < 1200, (seed, message)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys() == intact.found[0].keys(), seed
        assert all(bits(ours[name]) == bits(theirs[name]) for name in ours), seed
    for now, before in readers:
        if isinstance(now, dict) and case.kept:
            assert now.keys() == before.keys() and all(bits(now[n]) == bits(before[n]) for n in now), seed
    return bool(refusals)


@pytest.mark.long
@pytest.mark.parametrize("count", [QUICK, pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_mutated_source_is_read_or_refused(name: str, count: int, sources: Callable[[str], Intact]) -> None:
    intact, case, refused = sources(name), CASES[name], 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        seed = f"{name} {number}"
        random = Random(seed)
        file = random.choice(intact.files)
        content = file.read_bytes()
        try:
            changed = case.mutate(file if case.mutate is of_torch else content, random)  # type: ignore[arg-type]
            file.unlink()  # a mapping into memory keeps its content
            file.write_bytes(changed)
            refused += check(case, intact, seed)
        finally:
            file.unlink(missing_ok=True)
            file.write_bytes(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY
    assert refused or case.kept


@pytest.mark.long
def test_several_unreadable_arrays_give_one_error(
    sources: Callable[[str], Intact], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax abandons the other reads, each with an unawaited error."""
    intact, late = sources(".zarray"), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", hook := late.append)
    with orbax_io.one_error():
        assert sys.unraisablehook is not hook
    assert sys.unraisablehook is hook
    content = {file: file.read_bytes() for file in intact.files}
    try:
        for file in intact.files:
            file.unlink()
            file.write_bytes(content[file].replace(b"<f4", b"<f8"))
        message = outcome(resumed_by_jaxdist, intact)
        gc.collect()
    finally:
        for file in intact.files:
            file.unlink()
            file.write_bytes(content[file])
    assert isinstance(message, str) and "Not enough data" in message and not late
    assert isinstance(sys.unraisablehook, orbax_io.WithoutLateErrors)
    another = SimpleNamespace(exc_type=RuntimeError, exc_value=RuntimeError("another"))
    sys.unraisablehook(another)  # type: ignore[arg-type]
    assert late == [another]


@pytest.mark.long
def test_a_chunk_larger_than_the_memory(sources: Callable[[str], Intact]) -> None:
    """TensorStore would end the process."""
    intact = sources(".zarray of the optimizer")
    file = intact.files[0]
    content = file.read_bytes()
    described = json.loads(content)
    try:
        file.unlink()
        file.write_text(json.dumps(described | {"chunks": [2**36, *described["chunks"][1:]]}))
        messages = [outcome(read, intact) for read in (trained_by_jaxdist, resumed_by_jaxdist)]
    finally:
        file.unlink()
        file.write_bytes(content)
    assert all(isinstance(message, str) and f"{intact.path}" in message for message in messages), messages
    assert "exp_avg.embed.embedding has chunks of " in messages[1]


def moved(index: Any, name: str) -> None:
    (chunk,) = index.state_dict_metadata[name].chunks
    chunk.offsets = torch.Size([1, *chunk.offsets[1:]])


def without_parts(index: Any, name: str) -> None:
    index.state_dict_metadata[name].chunks = []


def without_a_file(index: Any, name: str) -> None:
    del index.storage_data[next(place for place in index.storage_data if place.fqn == name)]


INCOMPLETE: dict[Callable[[Any, str], None], str] = {
    moved: "its parts overlap or are not all of it",
    without_parts: "its parts overlap or are not all of it",
    without_a_file: ".metadata has no file of its part at [0, 0]",
}


@pytest.mark.long
@pytest.mark.parametrize("damage", INCOMPLETE, ids=lambda damage: damage.__name__)
def test_an_index_without_all_of_a_tensor(damage: Callable[[Any, str], None], sources: Callable[[str], Intact]) -> None:
    """torch alone would leave numbers of the tensor as they were in memory."""
    intact = sources(".metadata")
    (file,), name = intact.files, "model.embed.weight"
    content = file.read_bytes()
    index = pickle.loads(content)
    damage(index, name)
    try:
        file.unlink()
        file.write_bytes(pickle.dumps(index))
        readers = (read_by_jaxdist, trained_by_jaxdist, read_by_torch_ref, resumed_by_torch_ref)
        found = {outcome(read, intact) for read in readers}
    finally:
        file.write_bytes(content)
    fix = "use another checkpoint, or a copy"
    assert found == {f"{intact.path}: tensor {name}: {INCOMPLETE[damage]}; {fix}"}
