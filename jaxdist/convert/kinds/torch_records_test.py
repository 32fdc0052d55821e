"""Records of torch files are read at the offsets in their own headers, also in other programs' zips, or refused."""

import importlib
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdist.config import ConfigError
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.formats.hf import experiment_for, to_settings

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
torch_zip = importlib.import_module("jaxdist.convert.kinds.torch_zip")
dcp = importlib.import_module("torch.distributed.checkpoint")
MetadataIndex = importlib.import_module("torch.distributed.checkpoint.metadata").MetadataIndex

MODEL = MODELS["LlamaForCausalLM"]
Entries = list[tuple[zipfile.ZipInfo, bytes]]


def rezipped(file: Path, change: Callable[[Entries], Entries] = list, compression: int = zipfile.ZIP_STORED) -> None:
    """The same records in a zip written by Python."""
    with zipfile.ZipFile(file) as archive:
        entries = [(zipfile.ZipInfo(name), archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(file, "w") as archive:
        for info, content in change(entries):
            archive.writestr(info, content, compression)


def with_extra(entries: Entries) -> Entries:
    """Records at varying distances from their headers, as from a program with another alignment."""
    for number, (info, _) in enumerate(entries):
        info.extra = struct.pack("<2H", 0x4246, number) + b"Z" * number
    return entries


def renamed(entries: Entries) -> Entries:
    for info, _ in entries:
        info.filename = "other/" + info.filename.partition("/")[2]
    return entries


def without(name: str) -> Callable[[Entries], Entries]:
    return lambda entries: [(info, content) for info, content in entries if not info.filename.endswith(f"/{name}")]


def with_content(name: str, content: bytes) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        return [(info, content if info.filename.endswith(f"/{name}") else old) for info, old in entries]

    return change


REZIPPED: dict[str, Callable[[Entries], Entries]] = {
    "as it was": list,
    "reversed": lambda entries: entries[::-1],
    "other extra fields": with_extra,
    "another folder": renamed,
    "without byteorder": without("byteorder"),
    "without version": without(".format_version"),
}


@pytest.mark.long
@pytest.mark.parametrize("way", often(REZIPPED, ["reversed", "other extra fields", "without byteorder"]))
def test_another_programs_zip_is_read_as_torch_reads_it(way: str, tmp_path: Path) -> None:
    """Weights, moments and all other entries."""
    file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
    averages = torch.randn(4, 6)
    tree = torch.load(file, weights_only=True) | {"besides": [averages, averages[1:3], averages.T]}
    del tree["experiment"]
    torch.save(tree, file)
    rezipped(file, REZIPPED[way])
    right = torch.load(file, weights_only=True)
    found = torch_files.described(file)
    assert found.keys() == right["model"].keys()
    for name, entry in found.items():
        assert np.array_equal(entry.read(), right["model"][name].numpy()), name
    content = torch_files.read_content(file, experiment_for(MODEL.model_dump(), "test"))
    besides = content.origin.extras["besides"]
    assert all(torch.equal(a, b) for a, b in zip(besides, tree["besides"], strict=True))
    main([str(file), str(tmp_path / "b.pt"), "--verify", "--model", config(tmp_path)])
    there = torch.load(tmp_path / "b.pt", weights_only=True)
    for part in "model", "besides":
        assert str(there[part]) == str(right[part])


def config(folder: Path) -> str:
    (folder / "model.toml").write_text(experiment_for(MODEL.model_dump(), "test").to_toml())
    return str(folder / "model.toml")


@pytest.mark.long
def test_a_state_dict_alone_becomes_the_same_weights(tmp_path: Path) -> None:
    tree = torch.load(written(tmp_path / "w.pt", "torch", content_of(MODEL)), weights_only=True)["model"]
    (tmp_path / "w.pt").unlink()
    torch.save(dict(tree), tmp_path / "a.pt")
    rezipped(tmp_path / "a.pt")
    (tmp_path / "config.json").write_text(json.dumps(to_settings(MODEL, "float32")))
    main([str(tmp_path / "a.pt"), str(tmp_path / "hf"), "--to", "hf", "--verify"])
    back = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(back[name], tensor.numpy()) for name, tensor in tree.items())


def shares_bytes(file: Path) -> None:
    """The directory gives one record the offset of another."""
    with zipfile.ZipFile(file) as archive:
        begin = archive.start_dir
        one, other = (archive.getinfo(f"a/data/{key}") for key in (0, 1))
    content = bytearray(file.read_bytes())
    place = content.index(struct.pack("<I", other.header_offset), begin)
    content[place : place + 4] = struct.pack("<I", one.header_offset)
    file.write_bytes(content)


def twice(entries: Entries) -> Entries:
    return [*entries, entries[-1]]


def on_other_disks(file: Path) -> None:
    """The directory at the end is said to be on disk 255 of several."""
    content = bytearray(file.read_bytes())
    at = content.rindex(b"PK\x06\x06") + 16
    content[at : at + 8] = struct.pack("<2I", 2, 255)
    file.write_bytes(content)


def of_rezipped(change: Callable[[Entries], Entries]) -> Callable[[Path], None]:
    return lambda file: rezipped(file, change)


TEXTS: dict[str, tuple[Callable[[Path], None], str]] = {
    name: (of_rezipped(change), rf"a.pt: its record {message}; give a file that torch.save wrote$")
    for name, change, message in (
        ("no order", with_content("byteorder", b"\xff"), r"byteorder is b'\\xff', which torch does not read"),
        ("an empty order", with_content("byteorder", b""), "byteorder is b'', which torch does not read"),
        ("no version", without("version"), "version is missing"),
        ("a newer version", with_content("version", b"11\n"), r"version is b'11\\n', which torch does not read"),
        ("a damaged version", with_content("version", b"\x003"), r"version is b'\\x003', which torch does not read"),
        (
            "a damaged alignment",
            with_content(".storage_alignment", b"6x"),
            ".storage_alignment is b'6x', which torch .*",
        ),
    )
}
BY_TORCH: dict[str, tuple[Callable[[Path], None], str]] = TEXTS | {
    "an id in no text": (of_rezipped(with_content(".data/serialization_id", b"\xff")), "'utf-8' codec can't decode"),
    "on other disks": (on_other_disks, "it is damaged, .*unsupported multidisk archive"),
}
REFUSED: dict[str, tuple[Callable[[Path], None], str]] = BY_TORCH | {
    "missing": (of_rezipped(without("data/1")), r"its record data/1 is to have 3 torch.float32, and has none"),
    "short": (of_rezipped(with_content("data/1", b"few")), r"data/1 is to have 3 torch.float32, and has 3 bytes"),
    "big": (
        of_rezipped(with_content("byteorder", b"big")),
        r"a.pt: its byteorder is 'big', and 'little' alone",
    ),
    "no pickle": (of_rezipped(without("data.pkl")), r"a.pt"),
    "shares bytes": (shares_bytes, r"occurs twice, or shares bytes with another"),
    "twice": (of_rezipped(twice), r"occurs twice, or shares bytes with another"),
    "compressed": (lambda file: rezipped(file, compression=zipfile.ZIP_DEFLATED), r"its records are compressed"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_invalid_records(case: str, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(5.0), "b": torch.arange(3.0)}, tmp_path / "a.pt")
    change, message = REFUSED[case]
    change(tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=message):
        torch_files.described(tmp_path / "a.pt")
    if case in BY_TORCH:
        with pytest.raises((RuntimeError, ValueError)):
            torch.load(tmp_path / "a.pt", weights_only=True)


def test_a_tensor_beyond_its_record(tmp_path: Path) -> None:
    """Other tensors' numbers follow the record."""
    torch.save({"a": torch.arange(5.0), "b": torch.arange(100.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        content = archive.read("a/data.pkl")
    size = content.index(b"K\x05\x85")  # the shape (5,)
    rezipped(tmp_path / "a.pt", with_content("data.pkl", content[:size] + b"K\x09\x85" + content[size + 3 :]))
    with pytest.raises(ConfigError, match=r"its record data/0 has 20 bytes, and its tensors 36"):
        torch_files.described(tmp_path / "a.pt")


def test_a_tensor_that_was_saved_without_numbers(tmp_path: Path) -> None:
    torch.save({"a": torch.empty(5, device="meta"), "b": torch.ones(100)}, tmp_path / "a.pt")
    with pytest.raises(ConfigError, match=r"tensor a: it was saved without its numbers.*; leave it out|is refused"):
        torch_files.described(tmp_path / "a.pt")


class TestEntries:
    """Entries of a torch.distributed.checkpoint folder are torch.save files within files."""

    tensor = "model.model.norm.weight"

    def saved(self, folder: Path, name: str, value: Any, change: Callable[[Path], None]) -> Path:
        """A folder in which one entry's file is replaced after a change."""
        weights = torch.load(written(folder / "a.pt", "torch", content_of(MODEL)), weights_only=True)["model"]
        found = folder / "dcp"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that there is no process group
            dcp.save({"model": weights, "epoch": 3}, checkpoint_id=found, no_dist=True)
        torch.save(weights["model.norm.weight"] if value is None else value, folder / "part.pt")
        change(folder / "part.pt")
        content = (folder / "part.pt").read_bytes()
        (found / "e.distcp").write_bytes(b"before" + content + b"after")
        index = pickle.loads((found / ".metadata").read_bytes())
        key = MetadataIndex(name, torch.Size([0]) if name == self.tensor else None)
        index.storage_data[key] = type(index.storage_data[key])("e.distcp", len(b"before"), len(content))
        (found / ".metadata").write_bytes(pickle.dumps(index))
        return found

    @pytest.mark.parametrize("case", ["compressed", "big", "short"])
    def test_a_weight(self, case: str, tmp_path: Path) -> None:
        change, message = REFUSED[case]
        if case == "short":
            change, message = of_rezipped(with_content("data/0", b"few")), r"and has 3 bytes"
        found = self.saved(tmp_path, self.tensor, None, change)
        with pytest.raises(ConfigError, match=message.replace("a.pt", "e.distcp")):
            main([str(found), str(tmp_path / "run"), "--model", config(tmp_path)])

    def test_a_weight_that_another_program_zipped(self, tmp_path: Path) -> None:
        found = self.saved(tmp_path, self.tensor, None, of_rezipped(with_extra))
        main([str(found), str(tmp_path / "b.pt"), "--to", "torch", "--model", config(tmp_path)])
        right, there = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("a.pt", "b.pt"))
        assert all(torch.equal(there[name], tensor) for name, tensor in right.items())

    def test_a_bomb(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """An entry that is no weight is left out, and not allocated at the size it claims."""
        change, _ = REFUSED["compressed"]
        found = self.saved(tmp_path, "epoch", [torch.zeros(3_000_000)], change)
        main([str(found), str(tmp_path / "run"), "--model", config(tmp_path)])
        assert "1 entries stay behind, epoch first" in capsys.readouterr().out
        assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file()) < 1_000_000
