"""DeepSpeed's universal checkpoints as written by `ds_to_universal`: a folder per parameter."""

from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.deepspeed_folders_test import (
    STEP,
    Trained,
    check,
    deepspeed,
    group_settings,
    read_content,
    save,
    zero_2,
    zero_3,
)
from jaxdist.formats.sources import kind_of

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
    content = read_content(universal(tmp_path / "run", trained))
    check(content, trained)
    assert content.origin.left == ["the bfloat16 copy of the fp32 weights"]


@pytest.mark.parametrize("kind", ["fp32", "exp_avg", "step"])
def test_a_missing_file_is_named(kind: str, tmp_path: Path) -> None:
    """Weights alone can do without an optimizer's file."""
    tag = universal(tmp_path / "run", Trained(tmp_path))
    (tag / f"zero/model.norm.weight/{kind}.pt").unlink()
    with pytest.raises(ConfigError, match=rf"it has no zero/model.norm.weight/{kind}.pt; give the complete folder"):
        read_content(tag)
    if kind != "fp32":
        main([str(tag), str(tmp_path / "hf"), "--to", "hf"])


@pytest.mark.parametrize("held", [{"fp32": 1}, [1]])
def test_a_damaged_file_is_named(held: Any, tmp_path: Path) -> None:
    tag = universal(tmp_path / "run", Trained(tmp_path))
    torch.save(held, tag / "zero/model.norm.weight/fp32.pt")
    with pytest.raises(ConfigError, match=r"fp32.pt has no tensor param"):
        read_content(tag)


def test_groups_that_are_missing_leave_the_weights(tmp_path: Path) -> None:
    tag = universal(tmp_path / "run", Trained(tmp_path))
    save(tag / "zero/optimizer_state.pt", {})
    with pytest.raises(ConfigError, match=r"optimizer_state.pt has no param_groups; take the weights alone, --to hf"):
        read_content(tag)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])  # the fix


def test_a_name_that_leads_outside_is_refused(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag = universal(tmp_path / "run", trained)
    outside = {"../../../first": torch.Size([2])}
    save(tag / "mp_rank_00_model_states.pt", trained.engine(trained.groups, 2, param_shapes=[outside]))
    with pytest.raises(ConfigError, match=r"first.*give the complete folder"):
        read_content(tag)


def universal_3(folder: Path, trained: Trained, **changed: Any) -> Path:
    """Stage 3: flat tensors without a dict, and no files of steps."""
    of = zero_3(folder, trained, **changed)
    tag = of.rename(folder / f"{of.name}_universal")
    first, *others = sorted(tag.glob("*_optim_states.pt"))
    with deepspeed():
        held = torch.load(first, weights_only=False)["optimizer_state_dict"]
    for file in (first, *others):
        file.unlink()
    (folder / "latest").unlink()
    (folder / "latest_universal").write_text(tag.name)
    for kind, tensors in {"fp32": trained.tensors, **trained.moments}.items():
        for name, tensor in tensors.items():
            (tag / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save(tensor.flatten(), tag / "zero" / name / f"{kind}.pt")
    save(tag / "zero/optimizer_state.pt", held | {"param_groups": held["optimizer_state_dict"]["param_groups"]})
    return tag


@pytest.mark.parametrize("ranks", [1, 3])
def test_stage_3(ranks: int, tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag = universal_3(tmp_path / "run", trained, ranks=ranks)
    assert kind_of(tag) == "deepspeed"
    check(read_content(tag), trained)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])


def test_a_flat_tensor_that_is_cut_short_is_named(tmp_path: Path) -> None:
    tag = universal_3(tmp_path / "run", Trained(tmp_path))
    torch.save(torch.ones(3), tag / "zero/model.norm.weight/fp32.pt")
    with pytest.raises(ConfigError, match=r"hold less of model.norm.weight than its"):
        read_content(tag)


def cut_by_two(tag: Path, trained: Trained) -> None:
    """Tensor parallelism by two: each part of the model gives the shapes of its halves."""
    half = {name: torch.Size([t.shape[0] // 2, *t.shape[1:]]) for name, t in trained.tensors.items()}
    halves = [{name: half[name] for name in group} for group in trained.groups]
    for rank in range(2):
        save(tag / f"mp_rank_{rank:02}_model_states.pt", trained.engine(trained.groups, 2, param_shapes=halves))


def test_the_advice_for_tensors_cut_by_model_parallelism_leads_to_a_folder_that_is_read(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag, merged = zero_2(tmp_path / "run", trained), universal(tmp_path / "merged", trained)
    cut_by_two(tag, trained)
    with pytest.raises(ConfigError, match=r"cut by model parallelism.*ds_to_universal.*give its --output_folder"):
        read_content(tag)
    cut_by_two(merged, trained)
    check(read_content(merged), trained)


BY_DEEPSPEED = "load .*by DeepSpeed, save all weights under the names of a Hugging Face model, and give that folder"


def test_a_pipeline_is_refused_by_name(tmp_path: Path) -> None:
    """Its layers have numbers in place of names."""
    trained = Trained(tmp_path)
    tag = universal(tmp_path / "run", trained)
    save(tag / "mp_rank_00_model_states.pt", trained.engine(trained.groups, 2, module=None))
    with pytest.raises(ConfigError, match=rf"layers of DeepSpeed's pipeline.*{BY_DEEPSPEED}"):
        read_content(tag)


@pytest.mark.parametrize("beside", ["mp_rank_01_model_states.pt", "layer_00-model_states.pt"])
def test_parts_without_zero_are_refused_too(beside: str, tmp_path: Path) -> None:
    """`ds_to_universal` cannot convert them: it needs *_optim_states.pt."""
    trained = Trained(tmp_path)
    tag = zero_2(tmp_path / "run", trained)
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    save(tag / beside, trained.engine(trained.groups, 1))
    with pytest.raises(ConfigError, match=rf"which are not read; {BY_DEEPSPEED}"):
        read_content(tag)
