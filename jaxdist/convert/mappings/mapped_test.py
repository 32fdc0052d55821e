"""A user's model between Orbax and safetensors by a key mapping: complete and to the bit, or not at all."""

import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError, TrainingError
from jaxdist.convert import stream
from jaxdist.convert.__main__ import main
from jaxdist.convert.mappings import mapped
from jaxdist.convert.mappings.mapped import Pytree, Remapping
from jaxdist.convert.mappings.mapping import KeyMapping, Row
from jaxdist.convert.mappings.trees import flatten, unflatten
from jaxdist.runs.checkpoints import seal

pytestmark = pytest.mark.long

MAPPING = KeyMapping(
    (
        Row("block_{layer}.q.kernel", "blocks.{layer}.q.weight", "heads_out"),
        Row("block_{layer}.norms.0", "blocks.{layer}.norm.weight"),
        Row("scan.kernel", "stack.{layer}.weight", "transpose"),
    ),
    ours_only=("steps",),
    theirs_only=("counter",),
)


def tree(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    blocks = {f"block_{i}": {"q": {"kernel": draw(4, 2, 3)}, "norms": [draw(4)]} for i in range(2)}
    return {"params": blocks | {"scan": {"kernel": draw(3, 4, 5)}, "steps": np.array([seed], np.int32)}}


def save(path: Path, values: Any) -> Path:
    with ocp.StandardCheckpointer() as writer:
        writer.save(path, values)
    return path


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A checkpoint, another one of the same tree, and the mapping."""
    MAPPING.save(tmp_path / "mapping.toml")
    return save(tmp_path / "ours", tree()), save(tmp_path / "like", tree(1)), tmp_path / "mapping.toml"


def read_tree(path: Path) -> Any:
    found = Pytree(path)
    return unflatten(found.tree, {name: leaf.read() for name, leaf in found.leaves.items()})


def same(a: Any, b: Any) -> bool:
    x, y = flatten(a), flatten(b)
    return list(x) == list(y) and all(x[n].dtype == y[n].dtype and x[n].tobytes() == y[n].tobytes() for n in x)


@pytest.mark.parametrize("target", ["theirs.safetensors", "theirs"])
def test_there_and_back(target: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    ours, like, mapping = files
    main([str(ours), str(tmp_path / target), "--mapping", str(mapping)])
    file = tmp_path / target / "model.safetensors" if target == "theirs" else tmp_path / target
    tensors, saved = load_file(file), tree()["params"]
    assert sorted(tensors) == sorted(
        [f"blocks.{i}.{part}.weight" for i in range(2) for part in ("q", "norm")]
        + [f"stack.{i}.weight" for i in range(3)]
    )
    assert np.array_equal(tensors["stack.2.weight"], saved["scan"]["kernel"][2].T)
    assert np.array_equal(tensors["blocks.1.q.weight"], saved["block_1"]["q"]["kernel"].reshape(4, 6).T)
    save_file(tensors | {"counter": np.ones(1, np.int64)}, file, metadata={"format": "pt"})
    main([str(tmp_path / target), str(tmp_path / "back"), "--mapping", str(mapping), "--like", str(like)])
    wanted = tree()
    wanted["params"]["steps"] = tree(1)["params"]["steps"]  # ours alone: taken from `like`
    assert same(read_tree(tmp_path / "back"), wanted)
    with ocp.StandardCheckpointer() as reader:
        assert same(reader.restore(tmp_path / "back"), wanted)


@pytest.mark.parametrize("name", ["x.pt", "x.ckpt", "x.bin", "x.pth", "x.safetensors"])
def test_a_folder_is_not_named_as_a_file(name: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """A folder may not end in .safetensors, which names a single file."""
    ours, like, mapping = files
    main([str(ours), str(tmp_path / "theirs.safetensors"), "--mapping", str(mapping)])
    sources = [(tmp_path / "theirs.safetensors", ["--like", str(like)], "an Orbax checkpoint of a pytree")]
    if name != "x.safetensors":
        sources.append((ours, [], "a folder with model.safetensors"))
    for source, more, title in sources:
        with pytest.raises(ConfigError, match=rf"{name}: \.\w+ ends the name of a file, .* is a folder, {title}; give"):
            main([str(source), str(tmp_path / name), "--mapping", str(mapping), *more])
        assert not (tmp_path / name).exists()


@pytest.mark.parametrize("sealed", [".", "params"])
def test_a_source_that_changed(sealed: str, files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Detected by the manifest of the tree, or of the checkpoint around it."""
    ours, like, mapping = files
    theirs, again = tmp_path / "theirs.safetensors", tmp_path / "again"
    main([str(ours), str(theirs), "--mapping", str(mapping)])
    save_file(load_file(theirs) | {"counter": np.zeros(1, np.float32)}, theirs)
    main([str(theirs), str(again / "params"), "--mapping", str(mapping), "--like", str(like)])
    seal(again / sealed)
    main([str(again), str(tmp_path / "b"), "--mapping", str(mapping)])
    numbers = max(again.rglob("0*"), key=lambda file: file.stat().st_size)
    numbers.write_bytes(numbers.read_bytes()[::-1])
    for source, target, more in ((again, "c", []), (theirs, "d", ["--like", str(again)])):
        with pytest.raises(ConfigError, match=rf"is damaged: its file \S+{numbers.name} has changed"):
            main([str(source), str(tmp_path / target), "--mapping", str(mapping), *more])
        assert not (tmp_path / target).exists()


def test_dtype(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    ours, like, mapping = files
    main([str(ours), str(tmp_path / "half.safetensors"), "--mapping", str(mapping), "--dtype", "bfloat16"])
    half = load_file(tmp_path / "half.safetensors")
    assert {tensor.dtype for tensor in half.values()} == {np.dtype(ml_dtypes.bfloat16)}
    save_file(half | {"counter": np.ones(1, np.int64)}, tmp_path / "half.safetensors")
    arguments = ["--mapping", str(mapping), "--like", str(like), "--dtype", "float64"]
    main([str(tmp_path / "half.safetensors"), str(tmp_path / "back"), *arguments])
    back = flatten(read_tree(tmp_path / "back"))
    assert back["steps"].dtype == np.int32 and back["scan.kernel"].dtype == np.float64


@pytest.mark.parametrize("target", ["theirs.safetensors", "theirs", "back"])
def test_verify_reads_again(
    target: str, files: tuple[Path, Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, like, mapping = files
    arguments = [str(ours), str(tmp_path / target), "--mapping", str(mapping)]
    if target == "back":
        main([str(ours), str(tmp_path / "a.safetensors"), "--mapping", str(mapping)])
        save_file(load_file(tmp_path / "a.safetensors") | {"counter": np.ones(1)}, tmp_path / "a.safetensors")
        arguments = [str(tmp_path / "a.safetensors"), *arguments[1:], "--like", str(like)]
    main([*arguments, "--dry-run"])
    assert "nothing was written" in capsys.readouterr().out and not (tmp_path / target).exists()
    arguments.append("--verify")
    main(arguments)
    assert f"verified: {6 if target == 'back' else 7} tensors" in capsys.readouterr().out
    convert = Remapping.convert

    def changing(self: Remapping, *args: Any) -> dict[str, np.ndarray]:
        """Returns another number on each call."""
        found = convert(self, *args)
        for array in found.values():
            array.reshape(-1)[0] = next(numbers)
        return found

    numbers = iter(range(100))
    monkeypatch.setattr(Remapping, "convert", changing)
    with pytest.raises(TrainingError, match="read again as other numbers; nothing is kept"):
        main([*arguments, "--force"])
    assert (tmp_path / target).exists()  # the earlier one


def test_a_config_that_does_not_come_again_is_kept(files: tuple[Path, Path, Path], tmp_path: Path) -> None:
    ours, _, mapping = files
    arguments = [str(ours), str(tmp_path / "theirs"), "--mapping", str(mapping)]
    main(arguments)
    main([*arguments, "--force"])
    (tmp_path / "theirs" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has config.json, which is of no checkpoint or does not come again"):
        main([*arguments, "--force"])
    assert (tmp_path / "theirs" / "config.json").read_text() == "{}"


def test_pieces_in_another_order(tmp_path: Path) -> None:
    """Streaming agrees with conversion in memory where each side has its own order of pieces."""
    rows = [Row("kv", "qkv", "reshape", (1, 6), part=part, chunk=(1 - part, 2)) for part in range(2)]
    mapping, ours = KeyMapping(tuple(rows)), {"kv": np.arange(12.0, dtype=np.float32).reshape(2, 6)}
    mapping.save(tmp_path / "mapping.toml")
    arguments = ["--mapping", str(tmp_path / "mapping.toml"), "--verify"]
    main([str(save(tmp_path / "ours", ours)), str(tmp_path / "theirs.safetensors"), *arguments])
    found = load_file(tmp_path / "theirs.safetensors")["qkv"]
    assert np.array_equal(found, mapping.to_theirs(ours)["qkv"]) and np.array_equal(found, ours["kv"][::-1])
    main([
        str(tmp_path / "theirs.safetensors"), str(tmp_path / "back"), *arguments, "--like", str(tmp_path / "ours")
    ])  # fmt: skip
    assert same(read_tree(tmp_path / "back"), ours)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"a": np.ones(2, np.complex64)}, r"a is complex64, which safetensors files cannot hold"),
        ({"a.b": np.ones(2), "a": {"b": np.zeros(2)}}, r"two arrays of the tree are called a.b"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--dtype", "float32"]])
def test_trees_that_cannot_be_written(values: Any, message: str, more: list[str], tmp_path: Path) -> None:
    KeyMapping((Row("a", "a"), Row("a.b", "a.b"))[: len(values)]).save(tmp_path / "mapping.toml")
    source = str(save(tmp_path / "ours", values))
    with pytest.raises(ConfigError, match=message):
        main([source, str(tmp_path / "b"), "--mapping", str(tmp_path / "mapping.toml"), *more])
    assert not (tmp_path / "b").exists()


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Allocations counted by numpy, both ways; loading everything at once exceeds the bound."""
    values = {f"l_{i}": {"kernel": np.full((600, 600), i, np.float32)} for i in range(24)}
    mapping = KeyMapping((Row("l_{layer}.kernel", "l.{layer}.weight", "transpose"),))
    mapping.save(tmp_path / "mapping.toml")
    save(tmp_path / "ours", values)
    there = [str(tmp_path / "ours"), str(tmp_path / "theirs"), "--mapping", str(tmp_path / "mapping.toml")]
    back = [there[1], str(tmp_path / "back"), *there[2:], "--like", there[0]]
    for arguments in there, back:
        main(arguments)  # imports allocate too
    monkeypatch.setattr(stream, "AHEAD", 0)
    size = 600 * 600 * 4

    def peak(do: Callable[[], object]) -> int:
        tracemalloc.start()
        do()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    for arguments in there, back:
        assert peak(partial(main, [*arguments, "--force"])) < 5 * size
    assert (
        peak(lambda: list(mapped.to_theirs(tmp_path / "ours", mapping, None, None)[0].stream("parameters"))) > 20 * size
    )


@pytest.mark.parametrize("kind", ["manager", "items", "pytree", "nnx"])
def test_any_kind_of_orbax_checkpoint(kind: str, tmp_path: Path) -> None:
    values: Any = tree()
    if kind == "nnx":
        values = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
        save(tmp_path / "x", values)
    elif kind == "pytree":
        values = {"params": values["params"] | {"epoch": 3, "rate": 0.5}}
        with ocp.PyTreeCheckpointer() as writer:
            writer.save(tmp_path / "x", values)
    else:
        args = ocp.args.StandardSave(values)
        items = {"params": args, "ema": ocp.args.StandardSave(tree(1))}
        with ocp.CheckpointManager(tmp_path / "all") as manager:
            manager.save(7, args=args if kind == "manager" else ocp.args.Composite(**items))
            manager.wait_until_finished()
        (tmp_path / "all" / "7").rename(tmp_path / "x")
    read = flatten(read_tree(tmp_path / "x"))
    assert list(read) == list(flatten(values)) and all(np.array_equal(read[n], x) for n, x in flatten(values).items())


def test_names_of_trees() -> None:
    """A prefix that all names share is stripped, others are kept; leaves return to their places."""
    both = {"params": {"a": [1, 2]}, "batch_stats": {"m": 3}}
    assert flatten(both) == {"batch_stats.m": 3, "params.a.0": 1, "params.a.1": 2}
    assert list(flatten(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))) == ["bias", "kernel"]
    assert unflatten({"params": {"b": 0, "a": [0, 0]}}, {"a.0": 1, "b": 2, "a.1": 3}) == {
        "params": {"b": 2, "a": [1, 3]}
    }


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ours", "new", "--mapping", "nowhere.toml"], r"mapping nowhere.toml: .*give a readable TOML file"),
        (["nowhere", "new", "--mapping", "mapping.toml"], r"nowhere: neither; give a folder that ocp"),
        (["ours", "like", "--mapping", "mapping.toml"], r"TARGET like exists"),
        (["ours", "new", "--mapping", "short.toml"], r"short.toml: ours: scan.kernel, steps \(2 in all\) in no row"),
        (["ours", "new", "--mapping", "bent.toml"], r"bent.toml: steps \(1,\) has 1 axes, .* 'transpose' is not for"),
        (["ours", "new", "--mapping", "mapping.toml", "--like", "like"], r"--like like is of SOURCE's own kind; give"),
        (["theirs.safetensors", "new", "--mapping", "mapping.toml"], r"is torch's: give --like"),
        (["theirs.safetensors", "new", "--mapping", "mapping.toml", "--like", "like"], r"row 1: theirs = .*: no such"),
        (["cut.safetensors", "new", "--mapping", "mapping.toml", "--like", "like"], r"intact safetensors files"),
        (["ours", "new", "--like", "like"], r"--like belongs to --mapping"),
        (["ours", "new", "--mapping", "mapping.toml", "--to", "hf"], r"--to with --mapping"),
    ],
)  # fmt: skip
def test_bad_input(
    argv: list[str], message: str, files: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({"blocks.0.q.weight": np.ones((6, 4), np.float32)}, tmp_path / "theirs.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "theirs.safetensors").read_bytes()[:-3])
    KeyMapping(MAPPING.rows[:2]).save(tmp_path / "short.toml")
    KeyMapping((*MAPPING.rows, Row("steps", "steps", "transpose"))).save(tmp_path / "bent.toml")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        main(argv)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("target", ["new", "new.safetensors"])
def test_nothing_half_written(
    target: str, files: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("jaxdist.formats.buffers.write", full)
    with pytest.raises(TrainingError, match="could not be written: No space"):
        main([str(files[0]), str(tmp_path / target), "--mapping", str(files[2])])
    assert sorted(tmp_path.rglob("*")) == before
