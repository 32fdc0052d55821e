"""training_args.bin of transformers' Trainer: batch, clip, precision and schedule from a pickle that is not
executed."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import Experiment, Precision
from jaxdist.convert.content import PARAMETERS
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.kinds.trainer_folders_test import DONE, STEPS, Trained, huggingface, rates, scheduled
from jaxdist.formats import trainer_arguments

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
kinds = importlib.import_module("transformers.trainer_utils")
FUTURE = range(DONE + 1, STEPS + 1)


def arguments(folder: Path, schedule: str = "linear", **values: Any) -> Path:
    """The file as a Trainer writes it: an object with its dataclass' fields, including enums, a device and objects."""
    found = object.__new__(transformers.TrainingArguments)
    found.__dict__ |= {
        "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": STEPS,
        "learning_rate": 2e-3, "lr_scheduler_type": kinds.SchedulerType(schedule), "lr_scheduler_kwargs": {},
        "warmup_steps": 4, "optim": "adamw_torch_fused", "weight_decay": 0.05, "adam_beta1": 0.9, "adam_beta2": 0.99,
        "adam_epsilon": 1e-7, "max_grad_norm": 0.5, "bf16": False, "fp16": False,
        "logging_strategy": kinds.IntervalStrategy.STEPS, "device": torch.device("cpu"), "label_names": None,
        "debug": [],
    } | values  # fmt: skip
    torch.save(found, folder / trainer_arguments.FILE)
    return folder


SCHEDULES = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_warmup_with_min_lr": {"min_lr": 2e-4}, "polynomial": {},
    "linear": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_requested_schedule_continues(kind: str, tmp_path: Path) -> None:
    """Works without a log, and with warm-up as a share of the steps."""
    trained = Trained(tmp_path, schedule=kind, rule=SCHEDULES[kind])
    trained.log = []
    folder = arguments(
        huggingface(tmp_path / "checkpoint-9", trained), kind, lr_scheduler_kwargs=SCHEDULES[kind],
        warmup_steps=0.2 if kind == "linear" else 4,
    )  # fmt: skip
    found = KINDS["trainer"].format.read_content(folder)
    assert rates(found, FUTURE) == pytest.approx(scheduled(trained, FUTURE), rel=1e-6)
    assert rates(found, FUTURE)[0] > rates(found, FUTURE)[-1] > 0  # a constant schedule would fail here


def test_batch_clip_and_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes, each with a state of its random numbers."""
    folder = arguments(huggingface(tmp_path / "checkpoint-9", Trained(tmp_path)), bf16=True)
    for rank in range(2):
        (folder / f"rng_state_{rank}.pth").write_bytes(b"")
    e = KINDS["trainer"].format.read_content(folder).experiment
    assert (e.train.batch, e.train.accumulation, e.train.steps) == (16, 4, STEPS)
    assert (e.optimizer.clip, e.precision.policy) == (0.5, "bf16")
    assert "a batch of 16, 2 x 4 accumulated x 2 processes; clip 0.5, bf16" in capsys.readouterr().out


@pytest.mark.parametrize(("policy", "scale"), [("fp16", 65536.0), ("bf16", None), ("fp32", None)])
def test_the_precision_of_the_arguments(
    policy: str,
    scale: float | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arguments made by transformers. Without scaler.pt the loss scale is GradScaler's initial one."""
    # the original requires accelerate
    monkeypatch.setattr(transformers.TrainingArguments, "_setup_devices", torch.device("cpu"))
    trained = Trained(tmp_path)
    folder = huggingface(tmp_path / "checkpoint-9", trained)
    half = {policy: True} if policy != "fp32" else {}
    written = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), max_steps=STEPS, use_cpu=True, **half)
    torch.save(written, folder / trainer_arguments.FILE)
    found = KINDS["trainer"].format.read_content(folder)
    assert found.experiment.precision == Precision.model_validate({"policy": policy})  # including its dtypes and scale
    assert (found.scaling and float(found.scaling.scale)) == scale
    assert ("clip 1.0, fp16" in capsys.readouterr().out) == (policy == "fp16")


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("inverse_sqrt", 4, "jaxdist has no schedule like its inverse_sqrt; its current rate, "),
        (
            "linear",
            12,
            "it still warms up, at other rates than jaxdist does; from step 13 on its linear is warmup = 13",
        ),
    ],
)
def test_arguments_that_do_not_continue_are_named(
    kind: str, warmup: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained(tmp_path, schedule=kind, warmup=warmup)
    folder = arguments(huggingface(tmp_path / "checkpoint-9", trained), kind, warmup_steps=warmup)
    now = trained.optimizer.param_groups[0]["lr"]
    assert rates(KINDS["trainer"].format.read_content(folder), FUTURE) == pytest.approx([now] * len(FUTURE))
    assert expected in capsys.readouterr().out


def test_a_given_model_is_completed(tmp_path: Path) -> None:
    """The Trainer's arguments fill what --model leaves out, without config.json."""
    folder = arguments(huggingface(tmp_path / "checkpoint-9", Trained(tmp_path)))
    complete = KINDS["trainer"].format.read_content(folder).experiment
    (folder / "config.json").unlink()
    values = {"model": complete.model.model_dump(exclude_none=True), "optimizer": {"clip": 2.0}}
    values["data"] = {"sequence": complete.data.sequence}
    found = KINDS["trainer"].format.read_content(folder, Experiment.parse(values, "test")).experiment
    assert found.train == complete.train and found.optimizer == complete.optimizer.model_copy(update={"clip": 2.0})


def test_another_scheduler_than_the_arguments_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Trainer may be given its own; the logged rates then decide."""
    trained = Trained(tmp_path, schedule="cosine")
    folder = arguments(huggingface(tmp_path / "checkpoint-9", trained), "linear")
    assert rates(KINDS["trainer"].format.read_content(folder), FUTURE) == pytest.approx(
        scheduled(trained, FUTURE), rel=1e-6, abs=1e-9
    )
    assert "its rates equal those of decay = cosine over 20 steps" in capsys.readouterr().out


def test_weights_alone_go_on_by_the_arguments(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    folder = arguments(huggingface(tmp_path / "checkpoint-9", trained))
    (folder / "optimizer.pt").unlink()
    found = KINDS["trainer"].format.read_content(folder)
    assert [*found.groups] == [PARAMETERS]
    assert rates(found, FUTURE) == pytest.approx(scheduled(trained, FUTURE), rel=1e-6)
    o = found.experiment.optimizer
    assert (o.beta1, o.beta2, o.eps, o.weight_decay) == (0.9, 0.99, 1e-7, 0.05)


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_nothing_of_the_pickle_is_called(tmp_path: Path) -> None:
    """Values other than plain ones of their type are ignored."""
    folder = arguments(tmp_path, max_grad_norm=Evil(tmp_path / "evil"), gradient_accumulation_steps="4", other=Evil)
    found = trainer_arguments.read(folder)
    assert found["learning_rate"] == 2e-3 and not {"max_grad_norm", "gradient_accumulation_steps", "other"} & {*found}
    assert not (tmp_path / "evil").exists()
    (folder / trainer_arguments.FILE).write_bytes((folder / trainer_arguments.FILE).read_bytes()[:-900])
    assert trainer_arguments.read(folder) == {}
