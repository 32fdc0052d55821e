"""Every kind into every other and back: the same names, dtypes and bits, and the same step and moments."""

import importlib
import json
import logging
import pickle
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdist.config import ConfigError, Model, Optimizer, TrainingError
from jaxdist.conftest import often
from jaxdist.convert import stream, verify
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import PARAMETERS, Content, Leaf, entries_of
from jaxdist.convert.convert_test import MODELS, SMALL
from jaxdist.convert.entries import entries, shapes_of
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.mappings.atoms import Shape
from jaxdist.convert.stream import Conversion, units
from jaxdist.families.llama.config import Llama
from jaxdist.formats.finite import is_square, optimizer_tensor_name
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of, sibling
from jaxdist.formats.tables import HUGGINGFACE, LAYERS, OWN, tables_of
from jaxdist.runs import checkpoints

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
dcp_files = importlib.import_module("jaxdist.convert.kinds.dcp_files")

STATEFUL = ("orbax", "dcp", "torch")
FAMILIES = ["Qwen3ForCausalLM", "LlamaForCausalLM biases", "MistralForCausalLM", "GPT2LMHeadModel"]
WAYS = [("hf", "orbax"), ("orbax", "dcp"), ("dcp", "torch"), ("torch", "hf")]
# Every pair of kinds for one family; for the others each kind once on either end, and in the default suite one pair
# each.
PAIRS = [(*way, FAMILIES[0]) for way in product(("hf", *STATEFUL), repeat=2)]
OTHERS = [(*way, name) for way, name in product(WAYS, [*FAMILIES[1:], "MixtralForCausalLM"])]
QUICK = [(*way, name) for way, name in zip(WAYS, [*FAMILIES[1:], "MixtralForCausalLM"], strict=True)]


def content_of(model: Model, dtype: Any = np.float32, naming: str = OWN, **optimizer: Any) -> Content:
    """Random weights and moments after step 7, one of whose steps was skipped."""
    random, groups = np.random.default_rng(0), {}
    experiment = experiment_for(model.model_dump(), "test")
    experiment = experiment.model_copy(update={"optimizer": Optimizer(**optimizer)})
    for group in (PARAMETERS, *experiment.optimizer.kept):
        kind = np.dtype(dtype if group == PARAMETERS else np.float32)
        entries = entries_of(OWN, experiment, group).items()
        arrays = {name: random.normal(size=e.shape).astype(kind if e.shape else np.int32) for name, e in entries}
        for name, array in arrays.items():
            if is_square(name if group == PARAMETERS else optimizer_tensor_name(name, group)):
                np.abs(array, out=array)
        groups[group] = {n: Leaf(a.shape, a.dtype, partial(np.asarray, a)) for n, a in arrays.items()}
    ours = Content(experiment, OWN, groups, 7, 6)
    if naming == OWN:
        return ours
    return Content(ours.experiment, naming, Conversion(ours, naming).groups, 7, 6)


def written(path: Path, kind: str, content: Content) -> Path:
    target = KINDS[kind]
    content = content if target.state else content.weights()
    target.format.write(path, Conversion(content, target.naming_of(content)))
    return path


def tensors(path: Path) -> dict[tuple[str, str], tuple[Any, ...]]:
    """(group, name) -> dtype, shape and bytes of all tensors of a checkpoint."""
    content = KINDS[kind_of(path)].format.read_content(path)
    return {
        (group, name): (leaf.dtype, leaf.shape, leaf.read().tobytes())
        for group, leaves in content.groups.items()
        for name, leaf in leaves.items()
    } | {("", "steps"): (content.step, content.updates)}


@pytest.mark.parametrize("pair", often([*PAIRS, *OTHERS], QUICK), ids="-".join)
def test_there_and_back(pair: tuple[str, str, str], tmp_path: Path) -> None:
    first, second, name = pair
    dtype = ml_dtypes.bfloat16 if first == "hf" else np.float32
    content = content_of(MODELS[name], dtype)
    there = written(tmp_path / "first", first, content)
    main([str(there), str(tmp_path / "second"), "--to", second])
    main([str(tmp_path / "second"), str(tmp_path / "back"), "--to", first])
    before, after = tensors(there), tensors(tmp_path / "back")
    if second == "hf":
        before = {key: value for key, value in before.items() if key[0] == PARAMETERS}
        after = {key: value for key, value in after.items() if key[0] == PARAMETERS}
    assert before == after
    ours = Conversion(content, OWN)
    found = KINDS[second].format.read_content(tmp_path / "second")
    for group, key, array in Conversion(found, OWN).stream(*found.groups):
        assert array.tobytes() == ours.groups[group][key].read().tobytes(), (group, key)


@pytest.mark.parametrize("kind", ["orbax", "dcp"])
def test_no_number_is_read_again_for_its_checksum(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest gets checksums computed while arrays are in memory, under the names of their files."""
    seals, seal = list[tuple[int, bool]](), checkpoints.seal

    def spied(folder: Path, known: Mapping[str, str], **facts: Any) -> None:
        seals.append((len(known), all((folder / name).is_file() for name in known)))
        seal(folder, known, **facts)

    monkeypatch.setattr(checkpoints, "seal", spied)
    content = content_of(MODELS["Qwen3ForCausalLM"])
    written(tmp_path / "run", kind, content)
    assert seals == [(sum(map(len, Conversion(content, LAYERS).groups.values())), True)]


def test_a_planted_mistake_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the comparison of the test above can fail."""
    there = written(tmp_path / "first", "orbax", content_of(MODELS["Qwen3ForCausalLM"]))
    convert = Conversion.convert

    def swapped(self: Conversion, group: str, unit: Any) -> dict[str, np.ndarray]:
        arrays = convert(self, group, unit)
        return {n: np.roll(a, 1) if n.endswith("k_proj.weight") else a for n, a in arrays.items()}

    monkeypatch.setattr(Conversion, "convert", swapped)
    main([str(there), str(tmp_path / "second"), "--to", "dcp"])
    monkeypatch.undo()
    assert tensors(written(tmp_path / "right", "dcp", content_of(MODELS["Qwen3ForCausalLM"]))) != tensors(
        tmp_path / "second"
    )


OF_FAMILY = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@pytest.mark.parametrize(
    ("naming", "family"), [(naming, family) for family in OF_FAMILY for naming in (*tables_of(family), OWN)]
)
def test_units_are_the_least_and_hold_all(naming: str, family: str) -> None:
    model = MODELS[OF_FAMILY[family]]
    for other in (HUGGINGFACE, OWN):
        sources, targets = entries(naming, model), entries(other, model)
        found = units(sources, targets)
        for side, groups in (("sources", sources), ("targets", targets)):
            assert sorted(e.name for unit in found for e in getattr(unit, side)) == sorted(groups)
        for unit in found:
            atoms = [sorted(a for e in entries_ for a in e.atoms) for entries_ in (unit.sources, unit.targets)]
            assert atoms[0] == atoms[1]
        if naming == other:
            assert all(len(unit.sources) == len(unit.targets) == 1 for unit in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_names_and_their_order_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    from jaxdist.formats.hf import to_settings

    class_name = name.split()[0]
    config = getattr(transformers, class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config")
    with torch.device("meta"):
        module = getattr(transformers, class_name)(config(**to_settings(MODELS[name], "float32")))
    assert [n for n, _ in module.named_parameters()] == list(entries("huggingface", MODELS[name]))


class Payload:
    """Creates a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


class TestPickles:
    def alone(self, folder: Path) -> Path:
        """Another program's distributed checkpoint: in no run folder, without a manifest."""
        run = written(folder / "dcp", "dcp", content_of(MODELS["Qwen2ForCausalLM"]))
        (run / "checkpoints" / "7" / "manifest.json").unlink()
        return (run / "checkpoints" / "7").rename(folder / "alone")

    def test_the_payload_is_one(self, tmp_path: Path) -> None:
        pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
        assert (tmp_path / "ran").exists()

    @pytest.mark.parametrize("new", [True, False])
    def test_a_torch_file(self, new: bool, tmp_path: Path) -> None:
        tree = {"model": {"a": torch.ones(2)}, "evil": Payload(tmp_path / "ran")}
        torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        for command in ([str(tmp_path / "run")], ["--inspect"]):
            with pytest.raises(ConfigError, match=r"a.pt is refused: it holds more than tensors"):
                main([str(tmp_path / "a.pt"), *command])
        assert not (tmp_path / "ran").exists()

    def test_an_index(self, tmp_path: Path) -> None:
        """The index of a distributed checkpoint, which torch itself cannot load safely."""
        alone = self.alone(tmp_path)
        (alone / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
        with pytest.raises(ConfigError, match=r"its .metadata is refused: it names pathlib.*touch"):
            main([str(alone), str(tmp_path / "run")])
        assert not (tmp_path / "ran").exists()

    def test_an_entry(self, tmp_path: Path) -> None:
        """A pickle in place of a tensor."""
        alone = self.alone(tmp_path)
        for file in alone.glob("*.distcp"):
            torch.save(Payload(tmp_path / "ran"), file)
        with pytest.raises(ConfigError, match=r"alone: tensor"):
            main([str(alone), str(tmp_path / "run")])
        assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()

    def test_an_index_names_no_file_outside(self, tmp_path: Path) -> None:
        alone = self.alone(tmp_path)
        index = pickle.loads((alone / ".metadata").read_bytes())
        for place in index.storage_data.values():
            place.relative_path = f"../{place.relative_path}"
        (alone / ".metadata").write_bytes(pickle.dumps(index))
        with pytest.raises(ConfigError, match=r"is outside of"):
            main([str(alone), str(tmp_path / "run")])


class TestForce:
    """--force replaces a checkpoint, but neither the source nor anything else."""

    def test_its_source(self, tmp_path: Path) -> None:
        source = written(tmp_path / "hf", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        run = tmp_path / "run"
        main([str(source), str(run)])
        main([str(source), str(run / "export"), "--to", "hf"])
        before = sorted(tmp_path.rglob("*"))
        for path, target in ((run, run), (run / "checkpoints" / "0", run), (run, run / "checkpoints" / "0")):
            with pytest.raises(ConfigError, match=r"TARGET \S+ with --force would replace SOURCE"):
                main([str(path), str(target), "--force"])
        link = tmp_path / "link"
        link.symlink_to(run)
        with pytest.raises(ConfigError, match="would replace SOURCE"):
            main([str(run), str(link), "--force"])
        link.unlink()
        assert sorted(tmp_path.rglob("*")) == before

    def test_something_else(self, tmp_path: Path) -> None:
        source = written(tmp_path / "hf", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        home, notes, empty = tmp_path / "home", tmp_path / "notes.txt", tmp_path / "empty"
        home.mkdir()
        empty.mkdir()
        for file in (home / "thesis.tex", notes):
            file.write_text("years of work")
        for target in (home, notes):
            with pytest.raises(ConfigError, match=r"is not a checkpoint, and --force replaces nothing else"):
                main([str(source), str(target), "--force"])
        assert (home / "thesis.tex").read_text() == notes.read_text() == "years of work"
        main([str(source), str(empty), "--force"])
        assert kind_of(empty) == "orbax"


class TestCommandLine:
    def test_dry_run_and_force(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = written(tmp_path / "a", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        target = tmp_path / "b"
        main([str(source), str(target), "--dry-run"])
        assert not target.exists() and "nothing was written" in capsys.readouterr().out
        main([str(source), str(target)])
        with pytest.raises(ConfigError, match=r"TARGET \S+ exists; give another, or --force"):
            main([str(source), str(target)])
        before = sorted(target.rglob("*"))
        with pytest.raises(ConfigError, match=r"another model"):
            main([str(source), str(target), "--force", "--model", "default"])
        assert sorted(target.rglob("*")) == before
        main([str(source), str(target), "--force", "--dtype", "bfloat16"])
        main([str(target), str(tmp_path / "c"), "--to", "hf"])
        assert {leaf.dtype for leaf in KINDS["hf"].format.described(tmp_path / "c").values()} == {
            np.dtype(ml_dtypes.bfloat16)
        }
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]

    @pytest.mark.parametrize("target", often(["hf", *STATEFUL], ["hf", "orbax"]))
    def test_verify(self, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source = written(tmp_path / "a", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        main([str(source), str(tmp_path / "b"), "--to", target, "--verify"])
        output = capsys.readouterr().out
        assert "tensors read again are equal to the bit" in output and "logits of a probe batch, 2×12×7" in output
        main([str(source), str(tmp_path / "c"), "--to", target, "--verify", "--dtype", "bfloat16"])
        assert "is what rounding to bfloat16 may do" in capsys.readouterr().out

    @pytest.mark.parametrize("wrong", ["a number", "the step", "a logit"])
    def test_verify_finds(self, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = written(tmp_path / "a", "orbax", content_of(MODELS["Qwen2ForCausalLM"]))
        read_content, logits = dcp_files.read_content, verify.logits
        calls = []

        def otherwise(path: Path, wanted: Any = None, training: bool = True) -> Content:
            content = read_content(path, wanted, training)
            leaves = content.groups[PARAMETERS]
            name = next(name for name in leaves if name.endswith("k_proj.weight"))
            other = leaves[name].read() + np.float32(1e-6)
            changed = {**leaves, name: replace(leaves[name], read=lambda: other)}
            number = {"groups": {**content.groups, PARAMETERS: changed}}
            return replace(content, **({"step": 8} if wrong == "the step" else number if wrong == "a number" else {}))

        def counted(content: Content, inputs: np.ndarray) -> np.ndarray:
            calls.append(content)
            return logits(content, inputs) + (len(calls) == 2 and wrong == "a logit")

        monkeypatch.setattr(dcp_files, "read_content", otherwise)
        monkeypatch.setattr(verify, "logits", counted)
        message = {"a number": "as other numbers", "the step": "step 7 was .* as 8", "a logit": "logits .* differ by"}
        with pytest.raises(TrainingError, match=message[wrong]):
            main([str(source), str(tmp_path / "b"), "--to", "dcp", "--verify"])
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_verify_of_values_that_are_not_finite(self, tmp_path: Path) -> None:
        """NaN with `keep`, and zeros, are converted unchanged, and compare equal."""
        for value in np.nan, 0:
            content = content_of(MODELS["Qwen2ForCausalLM"])
            leaves = {
                n: Leaf(x.shape, x.dtype, partial(np.full, x.shape, value, x.dtype))
                for n, x in content.groups[PARAMETERS].items()
            }
            source = written(tmp_path / f"a{value}", "hf", replace(content, groups={PARAMETERS: leaves}))
            main([str(source), str(tmp_path / f"b{value}"), "--verify", "--nonfinite", "keep"])

    @pytest.mark.parametrize("killed", ["before", "after"])
    def test_a_kill_while_a_target_was_replaced(self, killed: str, tmp_path: Path) -> None:
        """The old target is restored after a kill between the two renames; later its remains are removed."""
        source = written(tmp_path / "a", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        main([str(source), str(tmp_path / "b")])
        right = tensors(tmp_path / "b")
        if killed == "before":
            (tmp_path / "b").rename(sibling(tmp_path / "b", "old"))
        else:
            (sibling(tmp_path / "b", "old") / "left").mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"TARGET .* exists"):
            main([str(source), str(tmp_path / "b")])
        assert tensors(tmp_path / "b") == right
        main([str(source), str(tmp_path / "b"), "--force"])
        assert tensors(tmp_path / "b") == right and sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]

    def test_a_name_that_is_no_step(self, tmp_path: Path) -> None:
        run = written(tmp_path / "a", "orbax", content_of(MODELS["Qwen2ForCausalLM"]))
        (run / "checkpoints" / "7").rename(tmp_path / "mine")
        with pytest.raises(
            ConfigError, match=r"mine: a checkpoint is named by its step, and mine is not a step; rename it"
        ):
            main([str(tmp_path / "mine"), str(tmp_path / "b")])

    def test_an_impossible_target(self, tmp_path: Path) -> None:
        source = written(tmp_path / "a", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        with pytest.raises(ConfigError, match=r"TARGET: .*File name too long"):
            main([str(source), str(tmp_path / ("x" * 300))])

    def test_files_beside_the_weights_come_back(self, tmp_path: Path) -> None:
        """config.json and tokenizer through a run folder, to the byte, with the files' metadata."""
        source = written(tmp_path / "a", "hf", content_of(MODELS["Qwen2ForCausalLM"]))
        settings = json.loads((source / "config.json").read_text()) | {"bos_token_id": 3, "_mine": "kept"}
        (source / "config.json").write_text(json.dumps(settings))
        (source / "tokenizer.json").write_text("{}")
        (source / "merges.txt").touch()
        for kind in STATEFUL:
            main([str(source), str(tmp_path / kind), "--to", kind])
            main([str(tmp_path / kind), str(tmp_path / f"{kind} back"), "--to", "hf"])
            for file in source.iterdir():
                assert (tmp_path / f"{kind} back" / file.name).read_bytes() == file.read_bytes(), (kind, file)


@pytest.mark.parametrize("kind", often(["hf", *STATEFUL], ["orbax"]))
def test_memory_is_bounded_by_the_largest_tensor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued and converted tensors, as counted by numpy; reading all first exceeds the bound."""
    ahead = 4_000_000
    model = Llama(**{**SMALL, "layers": 32, "dim": 192, "hidden": 768, "vocab": 1024})
    shapes = shapes_of(model)

    def read(shape: Shape) -> np.ndarray:
        array = np.full(shape, 1.5, np.float32)
        time.sleep(0.05)  # lets other threads read
        return array

    leaves = {n: Leaf(s, np.dtype(np.float32), partial(read, s)) for n, s in shapes.items()}
    content = Content(experiment_for(model.model_dump(), "test"), OWN, {PARAMETERS: leaves})
    bound = ahead + 2 * max(leaf.bytes for leaf in leaves.values())

    def peak(folder: str) -> int:
        tracemalloc.start()
        written(tmp_path / folder, kind, content)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest stores thousands of DCP's records
    written(tmp_path / "warm", kind, content)  # imports allocate too
    monkeypatch.setattr(stream.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(stream, "AHEAD", ahead // 4)  # the rest is for a plan of some hundred tensors
    assert peak("bounded") < bound
    monkeypatch.setattr(stream, "AHEAD", 10**12)
    assert peak("unbounded") > bound


@pytest.mark.parametrize("full", ["torch.save", "jaxdist.formats.buffers.write"])
def test_a_full_disk_is_reported(full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When files are created, within `torch.distributed.checkpoint`, or when they are filled; nothing is left."""
    source = written(tmp_path / "run", "orbax", content_of(Llama(**SMALL)))

    def write(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(full, write)
    with pytest.raises(TrainingError, match="could not be written: No space left on device; nothing is left"):
        main([str(source), str(tmp_path / "torch"), "--to", "dcp"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_failure_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """Moments may be in progress beside the failing weights."""
    content = content_of(MODELS["Qwen2ForCausalLM"])
    large = {
        **content.groups[PARAMETERS],
        "norm.scale": Leaf((8,), np.dtype(np.float32), lambda: np.full(8, 7e4, "f4")),
    }
    source = written(tmp_path / "a.pt", "torch", replace(content, groups={**content.groups, PARAMETERS: large}))
    for _ in range(3):
        with pytest.raises(ConfigError, match="has values beyond its range"):
            main([str(source), str(tmp_path / "b"), "--to", kind, "--dtype", "float16"])
        assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_parameters_and_moments_are_not_converted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orbax would write its items concurrently and take twice the memory."""
    busy, seen = 0, set()
    each = Conversion.each

    def counted(*arguments: Any) -> None:
        nonlocal busy
        busy += 1
        seen.add(busy)
        time.sleep(0.2)  # lets another one begin
        each(*arguments)
        busy -= 1

    monkeypatch.setattr(Conversion, "each", counted)
    written(tmp_path / "run", "orbax", content_of(Llama(**SMALL)))
    assert seen == {1}
