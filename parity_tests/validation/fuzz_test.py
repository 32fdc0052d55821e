"""Mutated files of every kind end in a ConfigError; a reader that accepts one is found."""

import io
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxdist.config import bounded, decoder
from jaxdist.conftest import often
from jaxdist.convert.kinds import torch_files, torch_leaves, torch_records
from jaxdist.convert.kinds.torch_records import place
from jaxdist.families.llama import huggingface
from jaxdist.families.mixtral import config as mixtral
from jaxdist.families.resnet import config as resnet
from jaxdist.formats import dcp_index, foreign, safetensors_files
from jaxdist.formats.hf_keys import COUNT, Key
from jaxdist.formats.torch_zips import Place
from jaxdist.runs import checkpoints
from parity_tests.validation import fuzz

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by what /proc says: Linux only")


def run(folder: Path, *arguments: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """The fuzzer in its own process, with the code `before` executed first."""
    script = f"{before}\nfrom parity_tests.validation import fuzz\nfuzz.main()"
    line = [sys.executable, "-c", script, str(folder), *arguments]
    # One malloc arena per thread would count as memory.
    return subprocess.run(line, cwd=ROOT, env=os.environ | {"MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("examples", "files"), [(20, 60), pytest.param(34_000, 100_000, marks=pytest.mark.slow)], ids=["quick", "slow"]
)
def test_mutated_files(examples: int, files: int, tmp_path: Path) -> None:
    """The quick run draws the same mutations each time, the slow one new ones."""
    start = random.randrange(10**6) if files > 1000 else 0
    done = run(tmp_path, "--examples", str(examples), "--seed", str(start))
    assert done.returncode == 0, f"--seed {start}\n{done.stdout}{done.stderr}"
    print(done.stdout)
    # without the readers' own output
    matches = [re.match(r"(\w+): ([\d,]+) files", line) for line in done.stdout.splitlines()]
    counts = {found[1]: int(found[2].replace(",", "")) for found in matches if found}
    assert all(matches)
    assert counts.keys() == fuzz.KINDS.keys()
    assert sum(counts[kind] for kind in ("safetensors", "index", "config", "manifest")) >= files


ONCE_FAILED = [(name, file) for name in fuzz.KINDS for file in fuzz.corpus(name)]


@pytest.mark.parametrize(("name", "file"), ONCE_FAILED, ids=[f"{name}/{file.name}" for name, file in ONCE_FAILED])
def test_files_that_once_failed_are_refused(name: str, file: Path, tmp_path: Path) -> None:
    folder = tmp_path / name
    fuzz.prepared(name, folder)
    assert not fuzz.accepted(name, folder, file.read_bytes())


def read_unchecked(tensors: Any, name: str) -> Any:
    (path, start), tensor = tensors.places[name], tensors.described[name]
    return np.fromfile(path, np.uint8, tensor.bytes, offset=start).view(tensor.dtype).reshape(tensor.shape)


def last_wins(pairs: list[tuple[str, Any]], checked: Any = bounded._object) -> Any:
    return checked(list(dict(pairs).items()))


def join(folder: Path, name: str) -> Path:
    return folder / name


def load_as_it_is(path: Path, **_: Any) -> Any:
    return torch.load(path, weights_only=True)


def neighbour(tensor: torch.Tensor) -> Place:
    start, size = place(tensor)
    return Place(start - 4 if size > 16 else start, size)  # not of a count


class AsFiles(io.BytesIO):
    """Allocates as much memory as a read asks for, then reads."""

    def read(self, size: int | None = -1) -> bytes:
        bytearray(max(size or 0, 0))
        return super().read(size)


def index_from_a_file(content: io.BytesIO, size: int, index: Callable[[Any, int], Any] = dcp_index.Index) -> Any:
    return index(AsFiles(content.getvalue()), size)


END = 10**12
# Planted: the kind of file, the replaced functions, and the fuzzer's finding.
PLANTS: dict[str, tuple[str, list[tuple[Any, str, Any]], str]] = {
    "any path in an index": ("index", [(foreign, "file_within", join)], "outside of the folder"),
    "keys twice in an index": ("index", [(bounded, "_object", last_wins)], "a key was given twice"),
    "keys twice in config.json": ("config", [(bounded, "_object", last_wins)], "a key was given twice"),
    "layers without end": (
        "config",
        [(huggingface, "KEYS", huggingface.KEYS | {"layers": Key("num_hidden_layers", COUNT)}),
         (decoder, "MOST_LAYERS", END)],
        "of each layer",
    ),
    "experts without end": (
        "config", [(mixtral, "MOST_EXPERTS", END), (mixtral, "MOST_EXPERTS_IN_ALL", END)], "of each layer"
    ),
    "experts in all without end": ("config", [(mixtral, "MOST_EXPERTS_IN_ALL", END)], "of each layer"),
    "blocks without end": ("config", [(resnet, "MOST_BLOCKS", END)], "one by one"),
    "numpy's errors": ("safetensors", [(safetensors_files.Tensors, "read", read_unchecked)], "imension"),
    "numbers from beside": ("torch", [(torch_leaves, "place", neighbour)], "other numbers than those that torch reads"),
    "torch's errors": ("torch", [(torch_files, "load", load_as_it_is)], "Weights only load failed"),
}  # fmt: skip


# Found late, or by a check that finds another one too.
LATER = ("any path in an index", "keys twice in config.json", "layers without end", "experts in all without end",
         "keys twice in an index", "blocks without end", "experts without end", "numpy's errors")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", often(PLANTS, PLANTS.keys() - LATER))
def test_a_planted_mistake_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plants, finding = PLANTS[name]
    for plant in plants:
        monkeypatch.setattr(*plant)
    with pytest.raises(Exception) as found:
        fuzz.fuzz(kind, tmp_path / kind, 2000, 0)
    errors = getattr(found.value, "exceptions", [found.value])
    assert any(finding in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("name", "plant", "file"),
    [
        ("safetensors", (bounded, "_object", last_wins), "tensor-given-twice"),
        ("index", (foreign, "file_within", join), "outside-by-dots.json"),
        ("index", (foreign, "file_within", join), "outside-by-a-link.json"),
        ("manifest", (bounded, "_object", last_wins), "file-given-twice.json"),
        ("manifest", (checkpoints, "file_within", join), "outside-by-dots.json"),
        ("manifest", (checkpoints, "file_within", join), "outside-by-a-link.json"),
        ("dcp", (dcp_index.Index, "dispatch", pickle._Unpickler.dispatch), "bytearray-of-8-terabytes"),  # type: ignore[attr-defined]
        ("dcp", (dcp_index, "Index", index_from_a_file), "bytes-of-8-terabytes"),
        ("torch", (torch_records, "rehearse", lambda *_: None), "bytearray-of-8-terabytes"),
    ],
)
def test_without_its_check_a_kept_file_fails_again(
    name: str, plant: tuple[Any, str, Callable[..., Any]], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    fuzz.prepared(name, folder)
    monkeypatch.setattr(*plant)
    with pytest.raises(AssertionError):
        fuzz.accepted(name, folder, (fuzz.CORPUS / name / file).read_bytes())


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "code", "expected"),
    [
        ("while True: pass", -signal.SIGPROF, "in parse"),
        pytest.param("bytearray(2_100_000_000)", 1, "MemoryError", marks=pytest.mark.slow),
        pytest.param("import os; os.abort()", -signal.SIGABRT, "", marks=pytest.mark.slow),
    ],
    ids=["hang", "memory", "crash"],
)
def test_a_process_that_cannot_say_so_itself(before: str, code: int, expected: str, tmp_path: Path) -> None:
    planted = f"from parity_tests.validation import fuzz\nfuzz.SECONDS = 1\ndef parse(text):\n  {before}\n"
    done = run(
        tmp_path, "--kinds", "config", before=f"{planted}from jaxdist.config import bounded\nbounded.parse = parse"
    )
    assert done.returncode == code and expected in done.stderr, done.stderr
