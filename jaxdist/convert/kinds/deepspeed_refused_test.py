"""DeepSpeed folders that lack a part, or hold an unsupported one: each is refused by name."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.deepspeed_folders_test import (
    LLAMA,
    Trained,
    check,
    deepspeed,
    read_content,
    save,
    zero_2,
    zero_3,
)
from jaxdist.formats.hf import experiment_for

torch = pytest.importorskip("torch")
load_torch = importlib.import_module("safetensors.torch").load_file


@pytest.mark.parametrize("layout", [zero_2, zero_3])
def test_a_missing_rank_is_named(layout: Any, tmp_path: Path) -> None:
    tag = layout(tmp_path / "run", Trained(tmp_path))
    next(tag.glob("*pp_rank_1_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(
        ConfigError, match=r"3 ranks wrote it, and it has 2 \*_optim_states.pt; give the complete folder"
    ):
        read_content(tag)


def test_without_its_pieces_the_copy_is_not_taken_silently(tmp_path: Path) -> None:
    tag = zero_2(tmp_path / "run", Trained(tmp_path))
    for file in tag.glob("*_optim_states.pt"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"fp32 weights and moments are missing.* or (\S+) for the copy") as error:
        read_content(tag)
    named = str(error.value).rpartition(" or ")[2].partition(" ")[0]
    main([named, str(tmp_path / "out")])  # the fix


@pytest.mark.parametrize("layout", [zero_2, zero_3])
def test_parts_name_their_folder(layout: Any, tmp_path: Path) -> None:
    tag = layout(tmp_path / "run", Trained(tmp_path))
    for file in sorted(tag.glob("*_states.pt")):
        with pytest.raises(ConfigError, match="give its folder") as error:
            main([str(file), str(tmp_path / "out")])
        assert str(error.value).endswith(str(tag))
    main([str(tag), str(tmp_path / "out")])


def test_placeholders_alone(tmp_path: Path) -> None:
    tag = zero_3(tmp_path / "run", Trained(tmp_path), ranks=1)
    next(tag.glob("*_optim_states.pt")).unlink()
    with pytest.raises(ConfigError, match=r"placeholders without weights; give a folder with all"):
        main([str(next(tag.glob("*_model_states.pt"))), str(tmp_path / "out")])


def test_numbers_that_do_not_add_up(tmp_path: Path) -> None:
    """Planted: a parameter missing from param_shapes would shift all others."""
    trained = Trained(tmp_path)
    for layout in (zero_2, zero_3):
        wrong = trained.shapes([trained.groups[0][1:], trained.groups[1]])
        tag = layout(tmp_path / layout.__name__, trained, param_shapes=wrong)
        with pytest.raises(ConfigError, match=r"its ranks hold|other parameters than"):
            read_content(tag)


@pytest.mark.parametrize("name", ["layer_00-model_states.pt", "zero_pp_rank_0_mp_rank_01_model_states.pt"])
def test_unsupported_checkpoints_are_refused_by_name(name: str, tmp_path: Path) -> None:
    tag = zero_2(tmp_path / "run", Trained(tmp_path))
    (tag / name).parent.mkdir(exist_ok=True)
    (tag / name).touch()
    with pytest.raises(ConfigError, match=r"which are not read; (load it|merge them) by "):
        read_content(tag)


def test_elastic_state_is_refused_by_name(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag = zero_2(tmp_path / "run", trained, ranks=1)
    file = next(tag.glob("*_optim_states.pt"))
    with deepspeed():
        tree = torch.load(file, weights_only=False)
    tree["optimizer_state_dict"]["base_optimizer_state"] = [{"exp_avg": torch.zeros(3)}]
    save(file, tree)
    with pytest.raises(ConfigError, match=r"elastic_checkpoint = true, which is not read; .*--to hf"):
        read_content(tag)
    main([str(tag), str(tmp_path / "hf"), "--to", "hf"])  # the fix


def test_without_a_config_it_needs_a_model(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    tag = zero_2(tmp_path / "run", trained)
    (tag / "config.json").unlink()
    with pytest.raises(ConfigError, match="does not say what model it is; give --model"):
        read_content(tag)
    check(read_content(tag, wanted=experiment_for(LLAMA.model_dump(), "test")), trained)


def test_a_class_of_another_module_is_refused(tmp_path: Path) -> None:
    tag = zero_2(tmp_path / "run", Trained(tmp_path), client=Path("anything"))
    with pytest.raises(ConfigError, match=r"is refused.*pathlib"):
        read_content(tag)


def test_a_folder_without_its_model_states_names_the_missing_files(tmp_path: Path) -> None:
    tag = zero_2(tmp_path / "run", Trained(tmp_path))
    (tag / "mp_rank_00_model_states.pt").unlink()
    for path in (tag, tag.parent):
        with pytest.raises(ConfigError, match=r"it has no \*mp_rank_\*_model_states.pt; give the complete folder"):
            read_content(path)
