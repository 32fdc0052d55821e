"""Writing and reading our Orbax checkpoints causes no warning of Orbax."""

import logging
from pathlib import Path

import pytest

from jaxdist.conftest import SHORT_RUN
from jaxdist.convert.__main__ import main
from jaxdist.convert.mappings.stacked_mapping_test import hf_tensors, maxtext, saved
from jaxdist.train import main as train
from jaxdist.training import orbax_io

pytestmark = pytest.mark.long


def test_orbax_does_not_miss_metadata_of_arrays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even without `quiet`, which comes after a process's first handler."""
    monkeypatch.setattr(orbax_io, "quiet", lambda: None)
    run, folder, back, theirs = (str(tmp_path / name) for name in ("run", "hf", "back", "theirs"))
    tree = saved(tmp_path / "tree", maxtext(hf_tensors()))
    with caplog.at_level(logging.WARNING, "absl"):
        train([*SHORT_RUN, "--train.steps", "1", "--output", run])
        train(["--resume", run, "--train.steps", "2"])
        main([run, folder, "--to", "hf"])
        main([folder, back])
        main([tree, theirs, "--mapping", "maxtext"])
        main([theirs, str(tmp_path / "tree again"), "--mapping", "maxtext", "--like", tree])
        logging.getLogger("absl").warning("ArrayMetadata")
    messages = [record.getMessage() for record in caplog.records if record.name == "absl"]
    assert [line for line in messages if "ArrayMetadata" in line] == ["ArrayMetadata"]
