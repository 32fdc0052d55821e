"""A training script's loss scale continues, and comes back under its key."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import Experiment, Precision
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds import orbax_files
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.formats.hf import experiment_for, to_settings
from jaxdist.training.loss_scale import state_of

torch = pytest.importorskip("torch")

MODEL = MODELS["Qwen2ForCausalLM"]
RULE = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7}
# key in a script's file -> the scaler's state, from a scale and its count of good steps
SCALER_STATES: dict[str, Callable[[float, int], dict[str, Any]]] = {
    "scaler": lambda scale, good: {"scale": scale} | RULE | {"_growth_tracker": good},
    "amp": lambda scale, good: {"loss_scaler0": {"loss_scale": scale, "unskipped": good}},
}


def script(folder: Path, **parts: Any) -> Path:
    """A training script's file with its model's config.json beside it."""
    (folder / "config.json").write_text(json.dumps(to_settings(MODEL, "float32")))
    written(folder / "a.pt", "torch", content_of(MODEL))
    tree = torch.load(folder / "a.pt", weights_only=True)
    del tree["experiment"]
    torch.save(tree | parts, folder / "a.pt")
    return folder / "a.pt"


def config(folder: Path, policy: str) -> list[str]:
    """Arguments that give the model in another precision."""
    values = experiment_for(MODEL.model_dump(), "test").model_dump(exclude_none=True)
    experiment = Experiment.parse(values | {"precision": {"policy": policy}}, "test")
    (folder / "given.toml").write_text(experiment.to_toml())
    return ["--model", str(folder / "given.toml")]


@pytest.mark.long
@pytest.mark.parametrize("policy", often(["", "fp16"], ["fp16"]))
@pytest.mark.parametrize("key", SCALER_STATES)
def test_it_goes_on_by_its_own_rule(key: str, policy: str, tmp_path: Path) -> None:
    """--model's rule is not used; Apex's is GradScaler's default."""
    file = script(tmp_path, **{key: SCALER_STATES[key](1024.0, 3)})
    main([str(file), str(tmp_path / "run"), *(config(tmp_path, policy) if policy else []), "--verify"])
    found = orbax_files.read_content(tmp_path / "run")
    assert found.scaling is not None and (float(found.scaling.scale), int(found.scaling.good)) == (1024.0, 3)
    rule = RULE if key == "scaler" else {}
    assert found.experiment.precision == Precision.model_validate({"policy": "fp16"} | rule)

    main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
    assert torch.load(tmp_path / "b.pt", weights_only=True)[key] == SCALER_STATES[key](1024.0, 3)
    written(tmp_path / "c.pt", "torch", replace(found, step=8, scaling=state_of(4096.0, 0)))
    back = torch.load(tmp_path / "c.pt", weights_only=True)
    assert back[key] == SCALER_STATES[key](4096.0, 0) and len({*SCALER_STATES} & {*back}) == 1


@pytest.mark.long
def test_it_ends_where_the_model_given_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(tmp_path, scaler=SCALER_STATES["scaler"](1024.0, 3))
    main([str(file), str(tmp_path / "run"), *config(tmp_path, "fp32")])
    assert "its loss scale ends here, precision.policy = fp32 of --model" in capsys.readouterr().out
    assert orbax_files.read_content(tmp_path / "run").scaling is None


@pytest.mark.long
@pytest.mark.parametrize(
    "apex",
    [
        {"enabled": True},
        {"a": {"loss_scale": 8.0}, "b": {"loss_scale": 4.0}},
        {"loss_scaler0": {"loss_scale": 8.0}, "x": 1},
    ],
    ids=["something else", "several losses", "and more"],
)
def test_other_scalers_are_kept_for_the_way_back(apex: dict[str, Any], tmp_path: Path) -> None:
    main([str(script(tmp_path, amp=apex)), str(tmp_path / "run")])
    found = orbax_files.read_content(tmp_path / "run")
    assert found.scaling is None and found.experiment.precision.policy == "fp32"
    main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
    assert torch.load(tmp_path / "b.pt", weights_only=True)["amp"] == apex
