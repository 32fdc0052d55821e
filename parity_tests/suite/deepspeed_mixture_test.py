"""Checkpoints of DeepSpeed's own mixtures are refused by name, on both sides and by convert."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jaxdist.config import ConfigError
from jaxdist.conftest import often
from jaxdist.convert.kinds.deepspeed_folders_test import LLAMA, Trained
from jaxdist.convert.kinds.deepspeed_universal_test import universal
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.formats.sources import kind_of
from parity_tests.runs import forkserver
from torch_ref.formats.hf import Weights

pytestmark = pytest.mark.long

READERS: list[Callable[[Path], Any]] = [
    lambda path: KINDS[kind_of(path)].format.read_content(path),
    lambda path: Weights(path, LLAMA),
]


def universal_mixture(folder: Path, older: bool) -> Path:
    """A universal checkpoint of a mixture, into which `ds_to_universal` copies the experts' files."""
    tag = universal(folder / "universal", Trained(folder / "universal"))
    for file in mixture(folder, True, older).glob("*expert_*"):
        shutil.copy(file, tag)
    (tag.parent / "latest").write_text(tag.name)
    return tag


def mixture(folder: Path, zero: bool, older: bool) -> Path:
    """A checkpoint of DeepSpeed's mixture: a file for each expert of each layer."""
    trained, tag = Trained(folder), folder / "run/global_step3"
    tag.mkdir(parents=True)
    torch.save(trained.engine(trained.groups, 1), tag / "mp_rank_00_model_states.pt")
    for expert in range(2):
        name = f"{'' if older else 'layer_0_'}expert_{expert}_mp_rank_00_model_states.pt"
        key = f"model.layers.0.mlp.deepspeed_moe.experts.deepspeed_experts.{expert}.up_proj.weight"
        torch.save({key: torch.ones(3, 4, dtype=torch.bfloat16)}, tag / name)
    rank = "bf16_zero_pp_rank_0" if zero else "expp_rank_0"
    torch.save({"optimizer_state_dict": {}}, tag / f"{rank}_mp_rank_00_optim_states.pt")
    (tag.parent / "latest").write_text(tag.name)
    return tag


LAYOUTS: dict[str, Callable[[Path, bool], Path]] = {
    "without ZeRO": lambda folder, older: mixture(folder, False, older),
    "ZeRO": lambda folder, older: mixture(folder, True, older),
    "universal": universal_mixture,
}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mixture_of_deepspeed_is_refused_by_name(layout: str, older: bool, tmp_path: Path) -> None:
    """Expert files without the rest are refused too; a single one is called a part."""
    tag = LAYOUTS[layout](tmp_path, older)
    experts = sorted(tag.glob("*expert_*"))
    message = (
        "are experts of DeepSpeed's mixtures, which are not read; load it by DeepSpeed, save all weights under the"
    )
    for read in READERS:
        with pytest.raises(ConfigError, match=r"expert_0_mp_rank_00_model_states\.pt is one expert .*; give its"):
            read(experts[0])
        for path in (tag, tag.parent):
            with pytest.raises(ConfigError, match=message):
                read(path)
    for file in {*tag.glob("*.pt")} - {*experts}:
        file.unlink()
    for read in READERS:
        with pytest.raises(ConfigError, match=message):
            read(tag)


@pytest.mark.parametrize("layout", often(["ZeRO", "universal"], ["ZeRO"]))
@pytest.mark.parametrize("module", often(["jaxdist.convert", "jaxdist.train", "torch_ref.train"], ["jaxdist.train"]))
def test_the_commands_end_with_2_and_one_line(module: str, layout: str, tmp_path: Path) -> None:
    tag = LAYOUTS[layout](tmp_path, False)
    line = (str(tag), str(tmp_path / "out"), "--to", "hf") if module == "jaxdist.convert" else ("--init", str(tag))
    done = forkserver.run(module, line, dict(os.environ))
    assert done.returncode == 2, done.stderr
    (error,) = (text for text in done.stderr.splitlines() if text.startswith("error: "))
    assert "are experts of DeepSpeed's mixtures" in error and "Traceback" not in done.stderr
