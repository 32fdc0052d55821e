"""An optimizer has the same schedule from any kind of file: torch file, Accelerate folder, DCP, DeepSpeed."""

import importlib
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError, Experiment
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Content
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds import deepspeed_folders_test as deepspeed
from jaxdist.convert.kinds.formats_test import content_of, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.optimizers.rates import rate_at
from jaxdist.formats.hf import experiment_for
from jaxdist.formats.sources import kind_of

torch = pytest.importorskip("torch")
dcp = importlib.import_module("torch.distributed.checkpoint")
save_file = importlib.import_module("safetensors.torch").save_file

LLAMA = MODELS["LlamaForCausalLM"]
DONE = deepspeed.STEP
PEAK, LEAST, STEPS = 3e-4, 3e-5, 200


def cosine(step: int) -> float:
    """torch's CosineAnnealingLR at our step, counted from 1."""
    return LEAST + (PEAK - LEAST) * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2


class Saved(NamedTuple):
    """A loop's learning rates: settings of its groups, and its scheduler's state."""

    group: dict[str, Any]
    scheduler: dict[str, Any]


COUNTERS = {"last_epoch": DONE, "_step_count": DONE + 1, "base_lrs": [PEAK] * 2, "_last_lr": [1e-4] * 2}
ALONE = Saved({"lr": 1e-4}, {})
LAMBDA = Saved({"lr": 1e-4, "initial_lr": PEAK}, COUNTERS | {"lr_lambdas": [None, None]})
COSINE = Saved({"lr": cosine(DONE + 1), "initial_lr": PEAK}, COUNTERS | {"T_max": STEPS, "eta_min": LEAST})


def tree(folder: Path, saved: Saved) -> dict[str, Any]:
    """Model and optimizer as a script saves them."""
    found: dict[str, Any] = torch.load(written(folder / "a.pt", "torch", content_of(LLAMA)), weights_only=True)
    for entry in found["optimizer"]["state"].values():
        entry["step"] = torch.tensor(float(DONE))
    for group in found["optimizer"]["param_groups"]:
        del group["initial_lr"]
        group |= saved.group
    return {"model": found["model"], "optimizer": found["optimizer"]}


def file(folder: Path, saved: Saved) -> Path:
    scheduler = {"scheduler": saved.scheduler} if saved.scheduler else {}
    torch.save(tree(folder, saved) | scheduler | {"step": DONE}, folder / "a.pt")
    return folder / "a.pt"


def accelerate(folder: Path, saved: Saved) -> Path:
    found, state = tree(folder, saved), folder / "state"
    state.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in found["model"].items()}, state / "model.safetensors")
    torch.save(found["optimizer"], state / "optimizer.bin")
    if saved.scheduler:
        torch.save(saved.scheduler, state / "scheduler.bin")
    return state


def distributed(folder: Path, saved: Saved) -> Path:
    found = tree(folder, saved)
    groups, state = found["optimizer"]["param_groups"], found["optimizer"]["state"]
    names = {i: n for group in groups for i, n in zip(group["params"], group["param_names"], strict=True)}
    entries = {
        f"state.{names.get(i, i)}.{key}": value for i, entry in state.items() for key, value in entry.items()
    } | {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["param_names"]
        for key, value in group.items()
        if key not in ("params", "param_names")
    }  # fmt: skip
    content = {"model": found["model"], "optimizer": entries, "train_state": {"step": torch.tensor(DONE)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        scheduler = {"lr_scheduler": saved.scheduler} if saved.scheduler else {}
        dcp.save(content | scheduler, checkpoint_id=folder / "step", no_dist=True)
    return folder / "step"


def zero(folder: Path, saved: Saved) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        for key, value in saved.group.items():
            patched.setitem(deepspeed.SETTINGS, key, value)
        source = deepspeed.zero_2(folder / "zero", deepspeed.Trained(folder), lr_scheduler=saved.scheduler or None)
    (source / "config.json").unlink()
    return source


Save = Callable[[Path, Saved], Path]
SOURCES: tuple[Save, ...] = (file, accelerate, distributed, zero)


def model(**schedule: Any) -> Experiment:
    """Content of --model: a model section, and a schedule if one is given."""
    values = experiment_for(LLAMA.model_dump(), "test").model_dump(exclude_unset=True)
    return Experiment.parse(values | ({"optimizer": schedule, "train": {"steps": STEPS}} if schedule else {}), "test")


def read_content(path: Path, wanted: Experiment, **peak: Any) -> Content:
    return KINDS[kind_of(path)].format.read_content(path, wanted, **peak)


def next_rates(content: Content) -> list[float]:
    assert content.step == content.updates == DONE
    return [rate_at(content.experiment, step) for step in range(DONE + 1, STEPS + 1, 9)]


@pytest.mark.long
@pytest.mark.parametrize("save", SOURCES)
def test_without_a_rule_the_current_rate_stays(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This is reported, with or without a scheduler."""
    for saved, reason in ((ALONE, "it has no schedule"), (LAMBDA, "the rule of its scheduler is not in it")):
        (folder := tmp_path / reason).mkdir()
        content = read_content(save(folder, saved), model())
        assert next_rates(content) == pytest.approx([1e-4] * 9, rel=1e-9)
        assert f"{reason}; its current rate, 0.0001, stays; --model gives a schedule" in capsys.readouterr().out


@pytest.mark.parametrize("save", SOURCES)
def test_the_rule_of_a_scheduler_goes_on(save: Save, tmp_path: Path) -> None:
    content = read_content(save(tmp_path, COSINE), model())
    assert next_rates(content) == pytest.approx([cosine(step) for step in range(DONE + 1, STEPS + 1, 9)], rel=1e-6)


SHAPE = {"warmup": 1, "decay": "cosine", "decay_steps": STEPS + 1, "final": LEAST / PEAK}


@pytest.mark.long
@pytest.mark.parametrize("save", often(SOURCES, [file, distributed]))
def test_a_given_schedule_sets_later_rates(save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept if it has the current rate, refused otherwise; with the groups' peak where they have one."""
    right = [cosine(step) for step in range(DONE + 1, STEPS + 1, 9)]
    config = model(learning_rate=PEAK, **SHAPE)
    for name, group, peak in (
        ("on", {"lr": cosine(DONE + 1)}, PEAK),
        ("before", {"lr": cosine(DONE)}, PEAK),
        ("own", {"lr": 1e-4, "initial_lr": PEAK / 2}, PEAK / 2),
    ):
        (tmp_path / name).mkdir()
        content = read_content(save(tmp_path / name, Saved(group, {})), config)
        assert next_rates(content) == pytest.approx([rate * peak / PEAK for rate in right], rel=1e-6), name
    assert "its peak, 0.00015, continues by the schedule of --model, whose own is 0.0003" in capsys.readouterr().out
    off = save(tmp_path, ALONE)
    there = f"{cosine(DONE):g} at step {DONE} and {cosine(DONE + 1):g} at step {DONE + 1}"
    with pytest.raises(ConfigError, match=rf"current rate is 0.0001, and the schedule of --model has {there}; give"):
        read_content(off, config)
    assert next_rates(read_content(off, config, peak="schedule")) == pytest.approx(right, rel=1e-6)
    assert next_rates(read_content(off, config, peak="now")) == pytest.approx(
        [r * 1e-4 / PEAK for r in right], rel=1e-6
    )


@pytest.mark.long
@pytest.mark.parametrize("save", SOURCES)
def test_the_flag_in_the_message_works(save: Save, tmp_path: Path) -> None:
    """Run by the command, for every kind with an optimizer of torch's."""
    source, config = save(tmp_path, ALONE), tmp_path / "model.toml"
    values = model(learning_rate=PEAK, **SHAPE).model_dump(exclude_unset=True)
    config.write_text(tomli_w.dumps(values))
    command = [str(source), str(tmp_path / "run"), "--to", "orbax", "--model", str(config)]
    with pytest.raises(ConfigError, match=r"give --peak schedule to continue by .* or --peak now"):
        main(command)
    assert not (tmp_path / "run").exists()
    main([*command, "--peak", "schedule"])
    assert rate_at(load(tmp_path / "run" / "config.toml", {}), DONE + 1) == pytest.approx(cosine(DONE + 1))


def test_the_flag_without_a_schedule_is_refused(tmp_path: Path) -> None:
    """A kind without such an optimizer refuses the flag too."""
    source = file(tmp_path, LAMBDA)
    with pytest.raises(ConfigError, match=r"--peak schedule: .* has no schedule that can be read; give one by --model"):
        read_content(source, model(), peak="schedule")
    assert read_content(source, model(learning_rate=2e-4), peak="schedule").experiment.optimizer.learning_rate == 2e-4
    main([str(source), str(tmp_path / "hf"), "--to", "hf", "--model", str(section(tmp_path))])
    with pytest.raises(ConfigError, match=r"--peak: SOURCE .* it belongs to deepspeed, trainer, dcp, torch; leave it"):
        main([str(tmp_path / "hf"), str(tmp_path / "run"), "--peak", "now"])
    with pytest.raises(ConfigError, match=r"--peak now: no optimizer state is read from .*; leave it out"):
        main([str(source), str(tmp_path / "more"), "--to", "hf", "--model", str(section(tmp_path)), "--peak", "now"])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dcp", "torch"])
def test_a_checkpoint_of_ours_has_its_schedule(kind: str, tmp_path: Path) -> None:
    source = written(tmp_path / ("a.pt" if kind == "torch" else "a"), kind, content_of(MODELS["LlamaForCausalLM"]))
    command = [str(source), str(tmp_path / "run"), "--to", "orbax"]
    with pytest.raises(ConfigError, match=r"--peak now: .* is jaxdist's own, and its config has its schedule; leave"):
        main([*command, "--peak", "now"])
    main(command)


def ungrouped(folder: Path, saved: Saved, grouped: Callable[[Path, Saved], dict[str, Any]] = tree) -> dict[str, Any]:
    found = grouped(folder, saved)
    groups, state = found["optimizer"]["param_groups"], found["optimizer"]["state"]
    names = {i: n for group in groups for i, n in zip(group["params"], group["param_names"], strict=True)}
    return found | {"optimizer": {"state": {names[i]: entry for i, entry in state.items()}, "param_groups": []}}


@pytest.mark.parametrize("save", [file, accelerate, distributed])
def test_settings_that_no_group_states_are_reported(
    save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with the values used instead, from --model and its defaults."""
    with monkeypatch.context() as patched:
        patched.setitem(globals(), "tree", ungrouped)
        source = save(tmp_path, ALONE)
    capsys.readouterr()
    content = read_content(source, model(learning_rate=2e-4))
    message = (
        "adamw, learning_rate = 0.0002, beta1 = 0.9, beta2 = 0.95, weight_decay = 0.1; [optimizer] of --model gives"
    )
    assert f"{source}: its optimizer has no param_groups, which state its settings; it continues with name = " in (
        lines := capsys.readouterr().out
    )
    assert message in lines and lines.count("\n") == 1
    assert content.updates == DONE and {*content.groups} == {"parameters", "exp_avg", "exp_avg_sq"}
    assert read_content(source, model(learning_rate=2e-4), peak="schedule").experiment == content.experiment
    for peak, fields in (("now", {"learning_rate": 2e-4}), ("schedule", {})):
        with pytest.raises(
            ConfigError, match=rf"--peak {peak}: the optimizer of .* has no param_groups, and so no rate"
        ):
            read_content(source, model(**fields), peak=peak)


def section(folder: Path) -> Path:
    (folder / "section.toml").write_text(tomli_w.dumps(model().model_dump(exclude_unset=True)))
    return folder / "section.toml"
