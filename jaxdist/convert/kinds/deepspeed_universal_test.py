"""DeepSpeed's universal checkpoints, as `ds_to_universal` lays them out: a folder of each parameter."""

from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.deepspeed_folders_test import STEP, Trained, check, group_settings, opened, save

torch = pytest.importorskip("torch")


def universal(folder: Path, trained: Trained) -> Path:
    tag = folder / f"global_step{STEP}_universal"
    for name in trained.tensors:
        place = tag / "zero" / name
        place.mkdir(parents=True)
        for kind, tensors in {"fp32": trained.tensors, **trained.moments}.items():
            torch.save({"cat_dim": 0, "param": tensors[name]}, place / f"{kind}.pt")
        torch.save(torch.tensor(float(STEP)), place / "step.pt")
    (folder / "config.json").write_bytes(trained.config)
    save(tag / "mp_rank_00_model_states.pt", trained.engine(trained.groups, 2))
    held = {"zero_stage": 2, "partition_count": [2, 2], "param_groups": group_settings([0.1, 0.0], [[0], [1]])}
    save(tag / "zero/optimizer_state.pt", held)
    return tag


def test_weights_moments_and_groups(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    content = opened(universal(tmp_path / "run", trained))
    check(content, trained)
    assert content.origin.left == ["the bfloat16 copy of the fp32 weights"]


@pytest.mark.parametrize("kind", ["fp32", "exp_avg", "step"])
def test_a_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    """Where it belongs to the optimizer, weights alone do without it."""
    tag = universal(tmp_path / "run", Trained(tmp_path))
    (tag / f"zero/model.norm.weight/{kind}.pt").unlink()
    with pytest.raises(ConfigError, match=rf"it has no zero/model.norm.weight/{kind}.pt; give the whole folder"):
        opened(tag)
    if kind != "fp32":
        main([str(tag), str(tmp_path / "hf"), "--to", "hf"])


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ({"fp32": 1}, "has no tensor param"),
        ([1], "holds no dict"),
    ],
)
def test_a_damaged_file_is_named(held: Any, says: str, tmp_path: Path) -> None:
    tag = universal(tmp_path / "run", Trained(tmp_path))
    torch.save(held, tag / "zero/model.norm.weight/fp32.pt")
    with pytest.raises(ConfigError, match=rf"fp32.pt {says}"):
        opened(tag)


def test_groups_that_are_missing_leave_the_weights(tmp_path: Path) -> None:
    tag = universal(tmp_path / "run", Trained(tmp_path))
    save(tag / "zero/optimizer_state.pt", {})
    with pytest.raises(ConfigError, match=r"optimizer_state.pt has no param_groups; take the weights alone, --to hf"):
        opened(tag)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])  # the fix


def test_a_name_that_leads_outside_is_refused(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag = universal(tmp_path / "run", trained)
    outside = {"../../../first": torch.Size([2])}
    save(tag / "mp_rank_00_model_states.pt", trained.engine(trained.groups, 2, param_shapes=[outside]))
    with pytest.raises(ConfigError, match=r"first.*give the whole folder"):
        opened(tag)
