"""The batch behind a loss is identified for every family, and the search stays short."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.data import IGNORED, Dataset, dataset_of
from parity_tests.proof import batches
from parity_tests.proof.evidence import Search
from parity_tests.runs.cases import IMAGES, write_images
from torch_ref.families.models import build
from torch_ref.parallel.weights import draw, fill, model_tensors

DECODER = {"layers": 2, "dim": 16, "hidden": 32, "vocab": 256, "positions": 32, "heads": 2}
MIXTURE = DECODER | {"family": "mixtral", "kv_heads": 2, "head_dim": 8, "experts": 4, "top_k": 2, "balance": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": DECODER | {"family": "llama", "kv_heads": 1, "head_dim": 8, "vocab_multiple": 100},
    "gpt2": DECODER | {"family": "gpt2"},
    "mixture": MIXTURE,
    "mixture of little room": MIXTURE | {"capacity": 1.0},
    "images": IMAGES,
}


def made(folder: Path, model: str, steps: int = 20) -> Experiment:
    """An experiment with two microbatches, on images or on lines of unequal lengths."""
    images, text = folder / "images.npz", folder / "lines.jsonl"
    write_images(images)
    random = np.random.default_rng(0)
    lines = ["".join(random.choice(list("abcdefgh"), size)) for size in random.integers(2, 40, 200)]
    text.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines), encoding="utf-8")
    data = {"path": str(images)} if model == "images" else {"path": str(text), "sequence": 24, "documents": "padded"}
    values = {"model": MODELS[model], "data": data, "train": {"steps": steps, "batch": 8, "accumulation": 2}}
    return Experiment.parse(values, source="test")


def weights(experiment: Experiment) -> dict[str, np.ndarray]:
    model = build(experiment.model)
    fill(model, lambda name, shape: draw(experiment.model, 0, name, shape))
    return {name: w.detach().numpy().copy() for name, w in model_tensors(model)}


def loss_of(experiment: Experiment, batch: Any, balance: float = 0.0) -> float:
    """Mean loss of a batch, plus `balance` times the mean balance loss of its two microbatches."""
    model = build(experiment.model).double()
    fill(model, lambda name, shape: draw(experiment.model, 0, name, shape))
    total, added = 0.0, 0.0
    for inputs, targets in zip(*(torch.from_numpy(part).chunk(2) for part in batch), strict=True):
        inputs, more = inputs if inputs.is_floating_point() else inputs.long(), {}
        if experiment.model.family == "mixtral":
            more["valid_BT"] = targets != IGNORED
        logits = model(inputs, **more)
        if isinstance(logits, tuple):
            logits, part = logits
            added += part.item() / 2
        logits = logits[..., : experiment.model.vocab].flatten(0, -2)
        total += functional.cross_entropy(logits, targets.long().flatten(), reduction="sum").item()
    return total / int((batch[1] != IGNORED).sum()) + balance * added


def further(batch: Any, kind: str) -> Any:
    """The batch with other targets."""
    tokens, targets = batch
    moved = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], IGNORED)], axis=1)
    targets = {"far": moved, "inputs": np.where(targets == IGNORED, targets, tokens)}.get(kind, targets)
    return tokens, np.where(targets == IGNORED, 0, targets) if kind == "padding" else targets


Fed = Callable[[Dataset], Any]
FED: dict[str, tuple[Fed, str]] = {
    "next": (lambda data: data.batch(3, 8, 0), "the batch of step 3"),
    "far": (lambda data: data.batch(10, 8, 0), "the batch of step 10"),
    "seed": (lambda data: data.batch(2, 8, 7), "the batch of train.seed = 7"),
    "half": (lambda data: type(b := data.batch(2, 8, 0))(b[0][4:], b[1][4:]), "the second half of the batch"),
    "validation": (lambda data: data.batch(2, 8, 0, "validation"), "a batch of the validation split"),
}


@pytest.mark.long
@pytest.mark.parametrize("fed", FED)
@pytest.mark.parametrize("model", [model for model in MODELS if model != "gpt2"])
def test_the_batch_is_identified(tmp_path: Path, model: str, fed: str) -> None:
    experiment = made(tmp_path, model)
    (batch, name), data = FED[fed], dataset_of(experiment)
    losses = loss_of(experiment, data.batch(2, 8, 0)), loss_of(experiment, batch(data))
    assert batches.identify(experiment, weights(experiment), 2, losses, 1e-9) == Search(found=name)


@pytest.mark.parametrize("model", ["mixture", "mixture of little room"])
def test_a_loss_with_the_balance_loss_is_recognized(tmp_path: Path, model: str) -> None:
    experiment = made(tmp_path, model)
    data, start = dataset_of(experiment), weights(experiment)
    ours = loss_of(experiment, data.batch(2, 8, 0))
    with_balance = loss_of(experiment, data.batch(2, 8, 0), balance=1.0)
    found = batches.identify(experiment, start, 2, (ours, with_balance), 1e-9)
    assert found == Search(remark="it is the loss of this batch with the balance loss of the experts added", own=True)
    other = loss_of(experiment, data.batch(4, 8, 0), balance=1.0)
    assert batches.identify(experiment, start, 2, (ours, other), 1e-9) == Search(found="the batch of step 4")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("far", "its targets one token too far"),
        ("inputs", "its inputs as targets"),
        ("padding", "its padding as targets too"),
    ],
)
def test_other_targets_are_recognized(tmp_path: Path, kind: str, name: str) -> None:
    experiment = made(tmp_path, "llama")
    batch = dataset_of(experiment).batch(2, 8, 0)
    losses = loss_of(experiment, batch), loss_of(experiment, further(batch, kind))
    assert batches.identify(experiment, weights(experiment), 2, losses, 1e-9).found == f"the batch with {name}"


def test_a_mean_over_padding_is_recognized(tmp_path: Path) -> None:
    experiment = made(tmp_path, "llama")
    batch = dataset_of(experiment).batch(2, 8, 0)
    loss = loss_of(experiment, batch)
    counted = loss * (batch[1] != IGNORED).sum() / batch[1].size
    found = batches.identify(experiment, weights(experiment), 2, (loss, counted), 1e-9)
    assert found == Search(
        remark="it is the loss of this batch as a mean over all its tokens, padding counted", own=True
    )


@pytest.mark.parametrize(
    ("model", "how"),
    [("gpt2", "model.gelu = exact"), ("llama", "model.norm_eps = 1e-08"), ("llama", "model.rope_theta = 1000000.0")],
)
def test_another_field_of_the_model_is_recognized(tmp_path: Path, model: str, how: str) -> None:
    """The effect on the loss may be small in float64, but not hidden by float32."""
    experiment = made(tmp_path, model)
    other = next(made for name, made in batches.other_models(experiment.model) if name == how)
    batch, start = dataset_of(experiment).batch(2, 8, 0), weights(experiment)
    losses = loss_of(experiment, batch), loss_of(experiment.model_copy(update={"model": other}), batch)
    found = batches.identify(experiment, start, 2, losses, 0.0)
    assert found == Search(remark=f"it is the loss of this batch with {how}", own=True)
    assert batches.identify(experiment, start, 2, losses, 1e-2) == Search()


def test_a_search_of_a_long_run_is_short_and_lists_its_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = made(tmp_path, "llama", steps=2000)
    ours = loss_of(experiment, dataset_of(experiment).batch(1000, 8, 0))
    monkeypatch.setattr(batches, "LONG", 0.0)
    found, remark, _ = batches.identify(experiment, weights(experiment), 1000, (ours, ours + 0.1), 1e-9)
    assert not found and "none of 35 other batches tried: of the 8 steps before and after and the first" in remark
    assert "comparing the loss of step 1000 with those of 35 other batches, about" in capsys.readouterr().out


def test_nothing_is_tried_where_our_own_loss_is_not_reproduced(tmp_path: Path) -> None:
    experiment = made(tmp_path, "llama")
    ours = loss_of(experiment, dataset_of(experiment).batch(2, 8, 0))
    assert batches.identify(experiment, weights(experiment), 2, (ours + 1e-3, ours), 1e-9) == Search()
    assert batches.identify(experiment, {}, 2, (ours, ours), 1e-9) == Search()
