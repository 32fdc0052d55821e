"""Hostile or unsealed Orbax checkpoints: our own errors, nothing read from outside, no memory allocated for them."""

import json
import os
import shutil
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.reader import READER
from jaxdist.formats import sources
from jaxdist.runs.checkpoints import MANIFEST
from jaxdist.training import orbax_io

ARRAY = "parameters/embed.embedding"


@pytest.fixture
def lone(tmp_path: Path) -> Path:
    """A checkpoint without a manifest and outside of a run folder, as from another program."""
    run = written(tmp_path / "run", "orbax", content_of(MODELS["Qwen3ForCausalLM"]))
    (tmp_path / "lone").mkdir()
    folder = (run / "checkpoints" / "7").rename(tmp_path / "lone" / "7")
    (folder / MANIFEST).unlink()
    return folder


def refused(folder: Path, message: str, to: str = "orbax") -> None:
    target = folder.parent.parent / "target"
    with pytest.raises(ConfigError, match=message):
        main([str(folder), str(target), "--to", to])
    assert not target.exists()


@pytest.mark.long
def test_it_is_read(lone: Path, tmp_path: Path) -> None:
    main([str(lone), str(tmp_path / "target"), "--to", "orbax"])


@pytest.mark.long
@pytest.mark.parametrize("place", [f"{ARRAY}/0.0", ARRAY, "parameters", "optimizer"])
def test_links_that_lead_outside(lone: Path, place: str, tmp_path: Path) -> None:
    """Links of a chunk, an array or an item; links within the checkpoint are followed."""
    shutil.move(lone / place, tmp_path / "elsewhere")
    (lone / place).symlink_to(tmp_path / "elsewhere")
    refused(lone, "is outside of")
    (lone / place).unlink()
    shutil.move(tmp_path / "elsewhere", lone / "inside")
    if place.startswith(ARRAY):
        (lone / "inside").rename(lone / "parameters" / "inside")
        (lone / place).symlink_to(lone / "parameters" / "inside")
        main([str(lone), str(tmp_path / "target"), "--to", "orbax"])


@pytest.mark.parametrize("place", [f"{ARRAY}/0.0", f"{ARRAY}/.zarray", "parameters/_METADATA"])
def test_pipes(lone: Path, place: str) -> None:
    (lone / place).unlink()
    os.mkfifo(lone / place)
    refused(lone, "it is not a file")


def test_a_chunk_that_is_missing(lone: Path) -> None:
    """TensorStore alone would read zeros."""
    (lone / ARRAY / "0.0").unlink()
    refused(lone, "missing")
    leaves = sources.found(lone, READER).leaves
    with pytest.raises(ConfigError, match="missing"):
        next(leaf for name, leaf in leaves.items() if "embed" in name).read()


@pytest.mark.long
def test_a_chunk_that_is_much_larger_than_the_array(lone: Path) -> None:
    array = lone / ARRAY
    metadata = json.loads((array / ".zarray").read_text())
    rows = 200_000_000 // 4 // metadata["shape"][1]
    metadata |= {"chunks": [rows, metadata["shape"][1]], "compressor": {"id": "zlib", "level": 1}}
    (array / ".zarray").write_text(json.dumps(metadata))
    (array / "0.0").write_bytes(zlib.compress(bytes(4 * rows * metadata["shape"][1]), 1))
    tracemalloc.start()
    refused(lone, "embed.embedding has chunks of 200,000,000 bytes")
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def test_an_array_called_like_a_place_outside(lone: Path, tmp_path: Path) -> None:
    shutil.move(lone / ARRAY, tmp_path / "elsewhere")
    file = lone / "parameters" / "_METADATA"
    text = file.read_text()
    for name, expected in ((str(tmp_path / "elsewhere"), "is outside of"), ("../../../elsewhere", "is outside of")):
        file.write_text(text.replace("embed.embedding", name))
        refused(lone, expected)


def optimizers() -> dict[str, Any]:
    count = np.zeros((), np.int32)
    return {
        "no list": {"a": np.ones(3)},
        "no parts": [np.ones(2)],
        "no number": [{"updates": np.ones(3, np.int32), "kept": {"exp_avg": {"a": np.ones(2)}}}],
        "no names": [{"updates": count, "kept": [np.ones(2)]}],
        "no count": [{"kept": {"exp_avg": {"a": np.ones(2)}}}],
        "no arrays": [{"updates": count, "kept": {"exp_avg": {"a": {"b": np.ones(2)}}}}],
    }


def saved(folder: Path, tree: Any) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)


@pytest.mark.long
@pytest.mark.parametrize("case", optimizers())
def test_an_optimizer_of_another_form(lone: Path, case: str) -> None:
    saved(lone / "optimizer", optimizers()[case])
    refused(lone, "checkpoint .*7 is damaged")


@pytest.mark.parametrize("tree", [[np.ones(3)], {"a": {"b": np.ones(3)}}], ids=["list", "nested"])
def test_parameters_of_another_form(lone: Path, tree: Any) -> None:
    saved(lone / "parameters", tree)
    refused(lone, "is damaged: its parameters are not arrays by name")
    with pytest.raises(ConfigError, match="are not arrays by name"):
        main(["--inspect", str(lone)])


def test_a_sharding_of_an_unknown_type(tmp_path: Path) -> None:
    """Orbax raises NotImplementedError."""
    saved(tmp_path / "parameters", {"a": jnp.ones(3)})
    file = tmp_path / "parameters" / "_sharding"
    file.write_text(file.read_text().replace("SingleDevice", "SingleDeDice"))
    with pytest.raises(ConfigError, match=r"is damaged: Conversion for SingleDeDiceSharding .*; use another"):
        orbax_io.on_host(tmp_path, "parameters")
