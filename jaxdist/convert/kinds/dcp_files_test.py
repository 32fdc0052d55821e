"""Distributed checkpoints: tensors written in parts by several ranks, and other programs' names for the parts of their
trees."""

import importlib
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS, SMALL
from jaxdist.convert.kinds.foreign_sources_test import config
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.scripts_test import EXPERIMENT, MODEL, saved_dcp, script
from jaxdist.convert.stream import Conversion
from jaxdist.families.llama.config import Llama
from jaxdist.formats.dcp_index import INDEX, nesting, read_index
from jaxdist.formats.hf import experiment_for
from jaxdist.runs.checkpoints import checkpoint_in
from jaxdist.training.loss_scale import state_of

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
dcp_files = importlib.import_module("jaxdist.convert.kinds.dcp_files")


def test_a_part_that_no_rank_wrote_is_reported(tmp_path: Path) -> None:
    """The parts of a tensor in the index must cover it."""
    tensors = dcp_files.Tensors(checkpoint_in(written(tmp_path / "run", "dcp", content_of(Llama(**SMALL)))))
    name, leaf = next(
        (name, leaf) for name, leaf in tensors.leaves.items() if len(leaf.shape) == 2 and not leaf.shape[0] % 2
    )
    entry = tensors.index.state_dict_metadata[name]
    (chunk,) = entry.chunks
    half = type(chunk)(chunk.offsets, torch.Size([leaf.shape[0] // 2, leaf.shape[1]]))
    assert leaf.read().shape == leaf.shape
    for parts in [half], [half, half], [half, half, half]:
        with pytest.raises(ConfigError, match="its parts overlap or are not all of it"):
            tensors.read(name, replace(entry, chunks=parts))
    beyond = type(chunk)(torch.Size([leaf.shape[0] // 2, 1]), half.sizes)
    with pytest.raises(ConfigError, match="its parts overlap or are not all of it"):
        tensors.read(name, replace(entry, chunks=[half, beyond]))
    rest = type(chunk)(torch.Size([leaf.shape[0] // 2, 0]), half.sizes)
    with pytest.raises(ConfigError, match=rf"\.metadata has no file of its part at \[{leaf.shape[0] // 2}, 0\]"):
        tensors.read(name, replace(entry, chunks=[half, rest]))
    place = dcp_files.MetadataIndex(name, rest.offsets)
    tensors.index.storage_data[place] = tensors.index.storage_data[dcp_files.MetadataIndex(name, chunk.offsets)]
    with pytest.raises(ConfigError, match="has float32"):  # these parts cover it, but the file holds the full tensor
        tensors.read(name, replace(entry, chunks=[half, rest]))


@pytest.mark.parametrize("cut", [0, 1])
def test_parts_of_ranks_take_no_memory_beside_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """A tensor of two ranks, split by rows or columns, is read a few rows at a time."""
    for module in (dcp_files, dcp_files.torch_leaves):
        monkeypatch.setattr(module, "PIECE", 2**16)
    numbers = torch.arange(2**20, dtype=torch.float32).reshape(4, 2**8, 2**10)
    halves = [half.contiguous() for half in numbers.chunk(2, cut)]
    tree = {"first": halves[0], "second": halves[1]}
    tensors = dcp_files.Tensors(saved_dcp(tmp_path, tree))
    entry = tensors.index.state_dict_metadata["first"]
    chunks = []
    for name, offset in (("first", 0), ("second", numbers.shape[cut] // 2)):
        offsets = torch.Size([offset * (axis == cut) for axis in range(3)])
        chunks.append(replace(entry.chunks[0], offsets=offsets))
        (found,) = (f for i, f in tensors.index.storage_data.items() if i.fqn == name)
        tensors.index.storage_data[dcp_files.MetadataIndex("both", offsets)] = found
    both = replace(entry, size=numbers.shape, chunks=chunks)
    tracemalloc.start()
    read = tensors.read("both", both)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(read, numbers.numpy())
    assert read.nbytes <= peak <= 1.2 * read.nbytes
    assert tensors._leaf("both", both).besides == 2**16


def trained(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model and its optimizer, named as torch's own functions name them."""
    tree, _ = script(folder)
    groups = [{**group, "params": group["param_names"]} for group in tree["optimizer"]["param_groups"]]
    entries = zip(
        [name for group in groups for name in group["params"]], tree["optimizer"]["state"].values(), strict=True
    )
    return tree["model"], {"state": dict(entries), "param_groups": groups}


def wrapped(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"module.{name}": tensor for name, tensor in tensors.items()}


def written_again(folder: Path, content: Any) -> Path:
    dcp_files.write(folder, Conversion(content, KINDS["dcp"].naming_of(content)))
    return checkpoint_in(folder)


@pytest.mark.parametrize(
    ("model", "optimizer", "step"),
    [
        ("state_dict", "optimizer_states.0", "global_step"),
        ("app.model", "app.optim", "step"),
        pytest.param("state_dict", "optimizer_state_dict", "global_step", marks=pytest.mark.slow),
        pytest.param("model_state_dict", "optim", "iteration", marks=pytest.mark.slow),
        pytest.param("module", "optimizer", "step", marks=pytest.mark.slow),
        pytest.param("model", "optimizer_0", "step", marks=pytest.mark.slow),
    ],
)
def test_parts_are_called_as_in_torch_files(model: str, optimizer: str, step: str, tmp_path: Path) -> None:
    weights, kept = trained(tmp_path)
    source = saved_dcp(tmp_path / "dcp", {model: weights, optimizer: kept, step: 7, "iter": torch.ones(3)})
    content = dcp_files.read_content(source, EXPERIMENT)
    assert (content.step, content.updates, content.groups["exp_avg"].keys()) == (7, 5, weights.keys())
    again = written_again(tmp_path / "back", content)
    assert read_index(again).state_dict_metadata.keys() == read_index(source).state_dict_metadata.keys()


def test_weights_alone_below_app(tmp_path: Path) -> None:
    """None of their names is that of a part."""
    weights, _ = trained(tmp_path)
    plain = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    content = dcp_files.read_content(saved_dcp(tmp_path / "dcp", {"app": plain}), EXPERIMENT)
    assert content.groups["parameters"].keys() == weights.keys()


def test_settings_are_no_optimizer(tmp_path: Path) -> None:
    """The candidate with a state is the optimizer."""
    weights, kept = trained(tmp_path)
    tree = {"model": weights, "optimizer": {"name": "adamw"}, "optimizer_state_dict": kept}
    content = dcp_files.read_content(saved_dcp(tmp_path / "dcp", tree), EXPERIMENT)
    assert content.groups["exp_avg"].keys() == weights.keys()


@pytest.mark.parametrize("value", [torch.tensor([1, 2, 3]), torch.ones(0)], ids=["three", "none"])
def test_an_entry_named_like_a_step_may_be_none(value: Any, tmp_path: Path) -> None:
    weights, _ = trained(tmp_path)
    content = dcp_files.read_content(saved_dcp(tmp_path / "dcp", {"model": weights, "iteration": value}), EXPERIMENT)
    assert (content.step, content.groups["parameters"].keys()) == (0, weights.keys())


def test_a_plain_step_of_a_run_of_ours(tmp_path: Path) -> None:
    """The script's step is kept, though its optimizer made fewer updates; also through the converted run."""
    weights, kept = trained(tmp_path)
    source = saved_dcp(tmp_path / "dcp", {"model": weights, "optimizer": kept, "step": 7})
    main([str(source), str(tmp_path / "run"), "--to", "dcp", *config(tmp_path, MODEL)])
    content = dcp_files.read_content(tmp_path / "run")
    assert (content.step, content.updates) == (7, 5)


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    weights, _ = trained(tmp_path)
    source = saved_dcp(tmp_path / "dcp", {"model": weights, "extra": {"a\udcff": torch.ones(2)}})
    main([str(source), str(tmp_path / "run"), "--to", "orbax", *config(tmp_path, MODEL)])
    main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"])


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("another", "optimizers"),
        ("second", "optim_d"),
        ("two of the names", "optim"),
        ("within", "optimizer.a"),
        ("without groups", "mine"),
        ("beside weights", "optimizer_of_it"),
    ],
)
def test_an_optimizer_elsewhere_is_refused(case: str, key: str, tmp_path: Path) -> None:
    """No optimizer state is dropped silently, as with a torch file; weights alone can be read."""
    weights, kept = trained(tmp_path)
    trees = {
        "another": {"model": weights, "optimizers": kept},
        "second": {"model": weights, "optimizer": kept, "optim_d": kept},
        "two of the names": {"model": weights, "optimizer": kept, "optim": kept},
        "within": {"model": weights, "optimizer": {"a": kept}},
        "without groups": {"model": weights, "mine": {"state": kept["state"]}},
        "beside weights": weights | {"optimizer_of_it": {"param_groups": kept["param_groups"]}},
    }
    source = saved_dcp(tmp_path / "dcp", trees[case])
    with pytest.raises(ConfigError, match=f"dcp: its '{key}' has an optimizer that is not read; .*--to hf takes"):
        dcp_files.read_content(source, EXPERIMENT)
    assert dcp_files.read_content(source, EXPERIMENT, training=False).groups["parameters"].keys() == weights.keys()


@pytest.mark.parametrize("through", often(["orbax", "torch", "dcp"], ["orbax"]))
def test_nested_entries_come_back_nested(through: str, tmp_path: Path) -> None:
    """Nested entries come back nested, so torch's dcp_to_torch_save rebuilds the tree."""
    format_utils = importlib.import_module("torch.distributed.checkpoint.format_utils")
    weights, kept = trained(tmp_path)
    tree = {"model": weights, "optimizer": kept, "step": 5, "more": {"rng": [torch.ones(2), torch.ones(3)], "a.b": 1}}
    source = saved_dcp(tmp_path / "dcp", tree)
    main([str(source), str(tmp_path / "there"), "--to", through, *config(tmp_path, MODEL)])
    again = checkpoint_in(tmp_path / "there")
    if through != "dcp":
        main([str(tmp_path / "there"), str(tmp_path / "back"), "--to", "dcp"])
        again = checkpoint_in(tmp_path / "back")
    assert read_index(again).planner_data == read_index(source).planner_data
    format_utils.dcp_to_torch_save(again, tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert found["model"].keys() == weights.keys() and found["optimizer"]["state"].keys() == weights.keys()
    assert [rng.numel() for rng in found["more"]["rng"]] == [2, 3] and found["more"]["a.b"] == 1


def test_paths_of_a_wrong_form_are_left_out() -> None:
    """Entries of an index may have any value, and repeat one string many times."""
    long: tuple[str, ...] = ("x" * 10**6,) * 10**6
    ways = {"a.b": ("a", "b"), "a.0": ["a", 0], "a.b.c": ("a", "b.c")}
    wrong = {"a": ("a",), "a.c": ("a", "d"), "a.d": 5, "a.e": ("a", None), "a.f": ("a", 10**9999), 5: ("a", "b")}
    wrong |= {"a.1": ("a", True), "a.g": ("a", ["g"]), "y" * 10**6: long}
    assert nesting(ways | wrong) == {name: [*way] for name, way in ways.items()}
    assert nesting(None) == nesting([1]) == {}


@pytest.mark.parametrize("weights_too", [False, True])
def test_moments_have_names_of_their_own(weights_too: bool, tmp_path: Path) -> None:
    """A wrapper's prefix may be in the optimizer's names, the model's, or both, and comes back there."""
    weights, kept = trained(tmp_path)
    parts = {"model": weights, "optimizer": {"state": wrapped(kept["state"])}}
    flat = wrapped(weights) | {"optimizer": {"state": wrapped(kept["state"])}}
    source = saved_dcp(tmp_path / "dcp", flat if weights_too else parts)
    again = written_again(tmp_path / "back", dcp_files.read_content(source, EXPERIMENT))
    assert read_index(again).state_dict_metadata.keys() == read_index(source).state_dict_metadata.keys()


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod"])
def test_wrapped_weights_of_a_tied_head_alone(wrapper: str, tmp_path: Path) -> None:
    """All names then begin with the model's own prefix inside the wrapper's."""
    model = MODELS["Qwen3ForCausalLM"]
    weights = torch.load(written(tmp_path / "a.pt", "torch", content_of(model)), weights_only=True)["model"]
    assert model.tied and weights.pop("lm_head.weight") is not None
    source = saved_dcp(tmp_path / "dcp", {f"{wrapper}.{name}": tensor for name, tensor in weights.items()})
    content = dcp_files.read_content(source, experiment_for(model.model_dump(), "test"))
    assert content.groups["parameters"].keys() == weights.keys()
    assert all(np.array_equal(leaf.read(), weights[name]) for name, leaf in content.groups["parameters"].items())
    again = written_again(tmp_path / "back", content)
    assert read_index(again).state_dict_metadata.keys() == read_index(source).state_dict_metadata.keys()


def test_an_index_of_older_torch(tmp_path: Path) -> None:
    """It stores tensor properties elsewhere, and no more than these."""
    old = importlib.import_module("torch.distributed._shard.sharded_tensor.metadata")
    weights, kept = trained(tmp_path)
    folder = saved_dcp(tmp_path / "dcp", {"model": weights, "optimizer": {"state": kept["state"]}})
    index = read_index(folder)
    for entry in index.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties = old.TensorProperties(dtype=entry.properties.dtype)
    for name in ("storage_meta", "version"):
        del vars(index)[name]
    written = pickle.dumps(index, protocol=2)
    assert b"_shard.sharded_tensor.metadata\nTensorProperties" in written and b"\nMEM_FORMAT_ENCODING" in written
    (folder / INDEX).write_bytes(written)
    content = dcp_files.read_content(folder, EXPERIMENT)
    assert all(np.array_equal(leaf.read(), weights[name]) for name, leaf in content.groups["parameters"].items())
    (folder / INDEX).write_bytes(written.replace(b"TensorProperties", b"ShardedTensorMetadata"))
    with pytest.raises(
        ConfigError, match=r"names torch\.distributed\._shard\S+ShardedTensorMetadata, which belongs to no"
    ):
        read_index(folder)


def test_an_empty_index_is_reported(tmp_path: Path) -> None:
    (tmp_path / INDEX).touch()
    with pytest.raises(ConfigError, match=r"its \.metadata is refused: EOFError\(\); use another"):
        read_index(tmp_path)


def test_averages_are_read_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are mapped, as they may exceed the memory."""
    model = MODELS["Qwen2ForCausalLM"]
    weights = torch.load(written(tmp_path / "a.pt", "torch", content_of(model)), weights_only=True)["model"]
    averages = {f"ema.{name}": tensor + 1 for name, tensor in weights.items()}
    folder = saved_dcp(tmp_path / "dcp", {f"model.{name}": tensor for name, tensor in weights.items()} | averages)
    read, right = list[str](), dcp_files.Tensors.read

    def noted(tensors: Any, name: str, entry: Any) -> Any:
        read.append(name)
        return right(tensors, name, entry)

    monkeypatch.setattr(dcp_files.Tensors, "read", noted)
    content = dcp_files.read_content(folder, experiment_for(model.model_dump(), "test"))
    extras = content.origin.extras
    assert extras.keys() == averages.keys() and all(torch.equal(extras[name], averages[name]) for name in averages)
    assert not averages.keys() & {*read}


@pytest.mark.parametrize("damage", ["missing", "extended", "lost"])
def test_a_count_that_cannot_be_read_is_named(damage: str, tmp_path: Path) -> None:
    """Counts are read when a checkpoint is opened; only they are damaged here."""
    folder = saved_dcp(tmp_path / "dcp", {"model.a": torch.ones(2), "optimizer.state.a.step": torch.tensor(5.0)})
    tensors = dcp_files.Tensors(folder)
    (at,) = (place for place in tensors.index.storage_data if place.fqn.endswith("step"))
    found = tensors.index.storage_data[at]
    if damage == "missing":
        del tensors.index.storage_data[at]
    elif damage == "extended":
        tensors.index.storage_data[at] = replace(found, transform_descriptors=["zstd"])
    else:
        (folder / found.relative_path).unlink()
    fix = "write it without extensions" if damage == "extended" else "use another checkpoint, or a copy"
    with pytest.raises(ConfigError, match=rf"dcp: tensor optimizer\.state\.a\.step: [^;]*; {fix}$"):
        tensors.extras("optimizer.")


@pytest.mark.parametrize("changed", [False, True])
def test_verify_looks_at_the_checksums_of_parts(
    changed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = MODELS["Qwen2ForCausalLM"]
    weights = torch.load(written(tmp_path / "a.pt", "torch", content_of(model)), weights_only=True)["model"]
    folder = saved_dcp(tmp_path / "dcp", weights)
    line = [str(folder), str(tmp_path / "run"), *config(tmp_path, model), "--verify"]
    if not changed:
        main(line)
        assert f"the records of {len(weights)} parts of dcp have their checksums" in capsys.readouterr().out
        return
    (file,) = folder.glob("*.distcp")
    numbers, some = bytearray(file.read_bytes()), weights["model.layers.0.mlp.up_proj.weight"].numpy().tobytes()
    numbers[numbers.index(some) + 5] ^= 1
    file.write_bytes(numbers)
    with pytest.raises(ConfigError, match=r"\.distcp, from byte \d+: its record \S+data/0 has changed since"):
        main(line)
    assert not (tmp_path / "run").exists()


def test_our_own_trees_are_nested_as_in_torch_ref(tmp_path: Path) -> None:
    """Model, optimizer and loss scale are dicts of the tree, in a run's checkpoint and a converted one."""
    drawn = content_of(Llama(**SMALL))
    values = drawn.experiment.model_dump(exclude_none=True) | {"precision": {"policy": "fp16"}}
    content = replace(drawn, experiment=Experiment.parse(values, source="test"), scaling=state_of(4096.0, 3))
    for there in ("dcp", "orbax", "torch"):
        first = written(tmp_path / there, there, content)
        if there != "dcp":
            main([str(first), str(tmp_path / f"{there}-dcp"), "--to", "dcp"])
            first = tmp_path / f"{there}-dcp"
        ways = read_index(checkpoint_in(first)).planner_data
        assert ways["model.embed.weight"] == ("model", "embed.weight")
        assert ways["optimizer.state.embed.weight.exp_avg"] == ("optimizer", "state", "embed.weight", "exp_avg")
        assert ways["optimizer.state.embed.weight.step"] == ("optimizer", "state", "embed.weight", "step")
        assert ways["scaling.scale"] == ("scaling", "scale")
        assert {len(way) for name, way in ways.items() if "." in name} == {2, 4}


def test_moments_of_two_names_of_one_parameter_are_refused(tmp_path: Path) -> None:
    """One of the two sets would be lost."""
    weights, kept = trained(tmp_path)
    twice = {"state": kept["state"] | wrapped(kept["state"])}
    source = saved_dcp(tmp_path / "dcp", {"model": weights, "optimizer": twice})
    with pytest.raises(ConfigError, match=r"its optimizer has \w+ of (\S+) and of module\.\1; leave one of them out"):
        dcp_files.read_content(source, EXPERIMENT)


def test_a_step_beside_weights_alone_comes_back_by_way_of_a_torch_file(tmp_path: Path) -> None:
    weights, _ = trained(tmp_path)
    source = saved_dcp(tmp_path / "dcp", {"model": weights, "step": 7})
    main([str(source), str(tmp_path / "there.pt"), *config(tmp_path, MODEL)])
    main([str(tmp_path / "there.pt"), str(tmp_path / "back"), "--to", "dcp"])
    assert dcp_files.read_content(tmp_path / "back").step == 7
