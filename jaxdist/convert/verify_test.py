"""A source that changed since it was written, and what a conversion makes of it."""

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError, Llama, checkpoints
from jaxdist.convert import verify
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import SMALL
from jaxdist.convert.formats_test import content_of, written
from jaxdist.convert.kinds import KINDS

dcp_files = importlib.import_module("jaxdist.convert.dcp_files")


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of which one file of numbers has changed; all of these are taken for large ones."""
    monkeypatch.setattr(checkpoints, "SMALL", 200)
    run = written(tmp_path / "run", "orbax", content_of(Llama(**SMALL)))
    file = run / "checkpoints" / "7" / "parameters" / "embed.embedding" / "0.0"
    numbers = bytearray(file.read_bytes())
    numbers[9] ^= 1
    file.write_bytes(numbers)
    return run


class TestSourceThatChanged:
    """It is compared with its manifest while it is converted, and what comes of it is not kept."""

    def test_is_refused(self, damaged: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"checkpoint .*7 is damaged: its file parameters/embed\S+ has changed"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])
        assert not (tmp_path / "target").exists()

    def test_explains_what_else_is_raised(self, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def confused(*_: Any) -> None:
            raise ConfigError("numbers as no others")

        monkeypatch.setattr(dcp_files, "write", confused)
        with pytest.raises(ConfigError, match="is damaged"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])

    def test_is_not_waited_for_by_what_cannot_be_written(
        self, damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*_: Any) -> None:
            raise ConfigError("its layers are of two dtypes")

        monkeypatch.setattr(dcp_files, "check", refused)
        with pytest.raises(ConfigError, match="two dtypes"):
            main([str(damaged), str(tmp_path / "target"), "--to", "dcp"])

    def test_its_small_files_are_compared_before(self, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        KINDS["orbax"].format.opened(damaged)
        monkeypatch.setattr(checkpoints, "SMALL", 1_000_000)
        with pytest.raises(ConfigError, match="is damaged"):
            KINDS["orbax"].format.opened(damaged)

    def test_a_signal_waits_for_no_further_file(self, damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, right = list[Path](), checkpoints.checksum

        def slow(file: Path, kind: str) -> str:
            begun.append(file)
            time.sleep(0.2)
            return right(file, kind)

        monkeypatch.setattr(checkpoints, "checksum", slow)
        with (
            pytest.raises(KeyboardInterrupt),
            verify.comparing(damaged / "checkpoints" / "7") as wait,
            verify.unchanged(wait),
        ):
            raise KeyboardInterrupt
        assert len(begun) < len(list(damaged.rglob("*.0"))) / 2
