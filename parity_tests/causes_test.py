"""Plain torch loops with one mistake each: the cause that the verdict names is the mistake."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.data import IGNORED, dataset_of
from parity_tests import batches, compare, levels
from parity_tests.bisect import STAGES, Parting
from parity_tests.causes import CAUSES, Diagnosis, Evidence, diagnose, of_parting
from torch_ref.models import build
from torch_ref.models.layers import rotary
from torch_ref.weights import draw, fill, held

STEPS = 12
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 2, "head_dim": 8},
    "gpt2": {"family": "gpt2", "heads": 4, "init_std": 0.1},
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of very unequal lengths, one a sequence, so that batches differ in their loss and number of tokens."""
    random, words = np.random.default_rng(0), Path(compare.__file__).read_text(encoding="utf-8").split()
    file = tmp_path_factory.mktemp("causes") / "documents.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for size in random.choice([1, 2, 3, 4, 6, 10, 20, 60], 400):
            start = random.integers(len(words) - size)
            lines.write(json.dumps({"text": " ".join(words[start : start + size])}) + "\n")
    return file


def experiment(documents: Path, model: str = "llama", **train: Any) -> Experiment:
    values = {
        "model": {"layers": 2, "dim": 32, "hidden": 64, "vocab": 256, "positions": 64} | MODELS[model],
        "data": {"path": str(documents), "sequence": 48, "documents": "padded"},
        "train": {"steps": STEPS, "batch": 8} | train,
        "optimizer": {"learning_rate": 0.003, "warmup": 4, "clip": 0.5},
    }
    return Experiment.parse(values, source="test")


@dataclass
class Finished:
    """What the evidence reads of a run."""

    side: str
    experiment: Experiment
    metrics: list[dict[str, Any]] = field(default_factory=list)
    kept_at_the_end: dict[str, np.ndarray] = field(default_factory=dict)
    before: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        return {name: w for name, w in self.kept_at_the_end.items() if name.startswith(f"{kind}/")}

    def kept(self, kind: str, step: int) -> dict[str, np.ndarray]:
        return {}


class Loop:
    """A right loop of a user's own, with places for mistakes."""

    accumulation = 1
    model = "llama"
    dtype = torch.float64

    def __init__(self, documents: Path) -> None:
        self.experiment = experiment(documents, self.model, accumulation=self.accumulation)
        self.data, self.o = dataset_of(self.experiment), self.experiment.optimizer

    def build(self) -> nn.Module:
        model = build(self.experiment.model).to(self.dtype)
        fill(model, lambda name, shape: draw(self.experiment.model, 0, name, shape))
        return model

    def rate(self, step: int) -> float:
        o, end = self.o, STEPS
        if step < o.warmup:
            return o.learning_rate * step / o.warmup
        part = min(1, (step - o.warmup) / (end - o.warmup))
        return o.learning_rate * (o.final + (1 - o.final) * (1 + math.cos(math.pi * part)) / 2)

    def logged_rate(self, step: int) -> float:
        return self.rate(step)

    def logged(self, loss: float, norm: float) -> tuple[float, float]:
        return loss, norm

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        o, parameters = self.o, dict(model.named_parameters())
        matrices = [p for name, p in parameters.items() if self.decays(name, p)]
        rest = [p for name, p in parameters.items() if not self.decays(name, p)]
        groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1.0, betas=self.betas(), eps=self.eps())

    def decays(self, name: str, parameter: Tensor) -> bool:
        return parameter.ndim >= 2

    def betas(self) -> tuple[float, float]:
        return self.o.beta1, self.o.beta2

    def eps(self) -> float:
        return self.o.eps

    def batch(self, step: int) -> tuple[Any, Any]:
        return tuple(self.data.batch(step, 8, 0))

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, -2), targets.flatten(), ignore_index=IGNORED)

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        loss = self.loss(model, tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def clip(self, model: nn.Module) -> float:
        return nn.utils.clip_grad_norm_(model.parameters(), self.o.clip).item()

    def run(self, side: str) -> Finished:
        finished = Finished(side, self.experiment)
        model = self.build()
        optimizer = self.optimizer(model)
        for step in range(1, STEPS + 1):
            finished.before[step] = {name: w.detach().numpy().copy() for name, w in held(model)}
            for group in optimizer.param_groups:
                group["lr"] = self.rate(step)
            optimizer.zero_grad()
            loss = self.backward(model, *(torch.from_numpy(part).long() for part in self.batch(step)))
            loss, norm = self.logged(loss, self.clip(model))
            optimizer.step()
            rate = self.logged_rate(step)
            finished.metrics.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate})
        for name, parameter in model.named_parameters():
            kept = {"weights": parameter.detach(), **optimizer.state[parameter]}
            finished.kept_at_the_end |= {f"{k}/{name}": w.numpy() for k, w in kept.items() if w.ndim}
        return finished


@pytest.fixture(scope="module")
def right(documents: Path) -> Finished:
    return Loop(documents).run("ours")


def named(wrong: Loop, right: Finished) -> Diagnosis | None:
    """The cause by which a loop differs from the right one in float64."""
    ours, theirs = replace(right, experiment=wrong.experiment), wrong.run("theirs")
    return diagnose(evidence(ours, theirs, {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}))


def evidence(ours: Finished, theirs: Finished, bounds: Mapping[str, np.ndarray]) -> Evidence:
    def batch(step: int) -> str:
        losses = ours.metrics[step - 1]["loss"], theirs.metrics[step - 1]["loss"]
        return batches.found(ours.experiment, ours.before[step], step, losses, bounds["loss"][step - 1])

    start = {f"weights/{name}": w for name, w in ours.before[1].items()}
    return Evidence(ours, theirs, bounds, start, batch)  # type: ignore[arg-type]


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(factor)


class MeanOfMeans(Loop):
    accumulation = 2

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        parts = [self.loss(model, t, y) / 2 for t, y in zip(tokens.chunk(2), targets.chunk(2), strict=True)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        return sum(part.item() for part in parts)


class NeverClipped(Loop):
    def clip(self, model: nn.Module) -> float:
        return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()


class ClippedScaled(Loop):
    """Gradients times the loss scale are clipped, and then divided by it."""

    def clip(self, model: nn.Module) -> float:
        norm = NeverClipped.clip(self, model)  # type: ignore[arg-type]
        scale_gradients(model, 65536.0)
        super().clip(model)
        scale_gradients(model, 1 / 65536.0)
        return norm


class OtherClip(Loop):
    def clip(self, model: nn.Module) -> float:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.501).item()


class TwoStepsAStep(Loop):
    def rate(self, step: int) -> float:
        return super().rate(2 * step)


class StepLate(Loop):
    def rate(self, step: int) -> float:
        return super().rate(step - 1)


class StepAhead(Loop):
    def rate(self, step: int) -> float:
        return super().rate(step + 1)


class NoWarmup(Loop):
    def rate(self, step: int) -> float:
        return super().rate(max(step, 4))


class RateLoggedWrong(Loop):
    def logged_rate(self, step: int) -> float:
        return super().logged_rate(step + 1)


class RateAppliedTwice(Loop):
    def rate(self, step: int) -> float:
        return 2 * super().rate(step)

    def logged_rate(self, step: int) -> float:
        return super().rate(step)


class HalfAccumulated(Loop):
    """Gradients of microbatches are summed in bfloat16."""

    accumulation = 4

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        count, total, parameters = (targets != IGNORED).sum(), 0.0, list(model.parameters())
        sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters]
        for t, y in zip(tokens.chunk(4), targets.chunk(4), strict=True):
            loss = self.loss(model, t, y) * (y != IGNORED).sum() / count
            total += loss.item()
            sums = [s + g.bfloat16() for s, g in zip(sums, torch.autograd.grad(loss, parameters), strict=True)]
        for p, s in zip(parameters, sums, strict=True):
            p.grad = s.to(p.dtype)
        return total


class Summed(Loop):
    """Gradients of two devices are summed, not averaged."""

    def clip(self, model: nn.Module) -> float:
        scale_gradients(model, 2.0)
        return super().clip(model)


class AddedLoss(Loop):
    """A penalty on the logits that is trained, and not in the loss that is logged."""

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        loss = self.loss(model, tokens, targets)
        (loss + 1e-3 * model(tokens).logsumexp(-1).square().mean()).backward()  # type: ignore[no-untyped-call]
        return loss.item()


class NormOfTheClipped(Loop):
    def logged(self, loss: float, norm: float) -> tuple[float, float]:
        return loss, min(norm, self.o.clip)


class LossLoggedInBits(Loop):
    def logged(self, loss: float, norm: float) -> tuple[float, float]:
        return loss / math.log(2), norm


class HalfRotation(Loop):
    """The rotation is rounded to bfloat16."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        def rounded(*given: Any, **more: Any) -> Any:
            return tuple(table.bfloat16().to(self.dtype) for table in rotary(*given, **more))

        with patch("torch_ref.models.llama.rotary", rounded):
            return super().loss(model, tokens, targets)


class Smoothed(Loop):
    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            model(tokens).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=0.1
        )


class LargeNormEps(Loop):
    def build(self) -> nn.Module:
        model = super().build()
        for module in model.modules():
            if hasattr(module, "eps"):
                setattr(module, "eps", 0.1)  # noqa: B010
        return model


class EmbeddingNotDecayed(Loop):
    def decays(self, name: str, parameter: Tensor) -> bool:
        return super().decays(name, parameter) and "embed" not in name


class NormsDecayed(Loop):
    def decays(self, name: str, parameter: Tensor) -> bool:
        return True


class Beta2(Loop):
    def betas(self) -> tuple[float, float]:
        return self.o.beta1, 0.999


class Eps(Loop):
    def eps(self) -> float:
        return 1e-5


class NextBatch(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        return super().batch(step + 1)


class SameBatch(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        return super().batch(1)


class BatchesFromFive(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        return super().batch(step if step < 5 else step + 20)


class OtherSeed(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        return tuple(self.data.batch(step, 8, 3))


class UnknownSeed(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        return tuple(self.data.batch(step, 8, 20260))


class HalfOfTheBatch(Loop):
    def batch(self, step: int) -> tuple[Any, Any]:
        tokens, targets = super().batch(step)
        return tokens[:4], targets[:4]


class OtherStart(Loop):
    def build(self) -> nn.Module:
        model = super().build()
        fill(model, lambda name, shape: draw(self.experiment.model, 1, name, shape))
        return model


NAMED = [
    (MeanOfMeans, "forward pass or loss", 1, "a mean of their means is such a loss"),
    (NeverClipped, "clip", 1, "as if the clip of 0.5 were not applied"),
    (TwoStepsAStep, "learning rate", 1, "their schedule goes 2 steps a step"),
    (StepLate, "learning rate", 1, "their schedule is 1 step late"),
    (ClippedScaled, "clip", 1, "times ours, by its moments"),
    (HalfRotation, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (HalfAccumulated, "gradients", 1, "the sum over 4 microbatches and its dtype"),
    (EmbeddingNotDecayed, "weight decay", 1, "embed.weight of theirs differs at the end along itself"),
    (StepAhead, "learning rate", 1, "their schedule is 1 step ahead"),
    (NoWarmup, "learning rate", 1, "it is 0.003 in theirs, and 0.00075 in ours"),
    (RateLoggedWrong, "learning rate", 1, "so it is only logged otherwise"),
    (RateAppliedTwice, "update of the weights", 1, "a learning rate that is not the logged one"),
    (OtherClip, "clip", 1, "times ours, by its moments"),
    (Summed, "gradients", 1, "all are 2 times ours"),
    (AddedLoss, "gradients", 1, "a loss that is added"),
    (NormOfTheClipped, "gradients", 1, "the norm alone is computed or logged otherwise"),
    (LossLoggedInBits, "forward pass or loss", 1, "so it is only logged otherwise"),
    (Smoothed, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (LargeNormEps, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (NormsDecayed, "weight decay", 1, "more than ours"),
    (Beta2, "moments", 2, "exp_avg_sq of theirs is"),
    (Eps, "update of the weights", 1, "update rule"),
    (NextBatch, "other batches", 1, "the batch of step 2"),
    (SameBatch, "other batches", 2, "the batch of step 1"),
    (BatchesFromFive, "other batches", 5, ""),
    (OtherSeed, "other batches", 1, "the batch of train.seed = 3"),
    (UnknownSeed, "other batches", 1, "as much as the losses of two batches"),
    (HalfOfTheBatch, "other batches", 1, "the first half of the batch"),
    (OtherStart, "other starting weights", 1, "times the size of the given ones away"),
]


@pytest.mark.parametrize(("loop", "cause", "step", "how"), NAMED, ids=[loop.__name__ for loop, *_ in NAMED])
def test_the_cause_is_named(
    documents: Path, right: Finished, loop: type[Loop], cause: str, step: int, how: str
) -> None:
    found = named(loop(documents), right)
    assert found and (found.cause, found.step) == (cause, step) and how in found.how, found


def test_a_right_loop_has_no_cause(documents: Path, right: Finished) -> None:
    assert named(Loop(documents), right) is None


# ---- in float32, whose rounding hides what differs little


class Single(Loop):
    model = "gpt2"
    dtype = torch.float32


class SingleInDouble(Single):
    dtype = torch.float64


class ExactGelu(Single):
    """Where the model has the tanh approximation of GELU."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        gelu = functional.gelu
        with patch.object(functional, "gelu", lambda x, approximate: gelu(x)):
            return super().loss(model, tokens, targets)


class SingleSummed(Single, Summed): ...


class SingleNextBatch(Single, NextBatch): ...


class SingleBeta2(Single, Beta2): ...


class SingleLate(Single, StepLate): ...


ROUNDED = [
    (ExactGelu, "forward pass or loss", "from equal weights and batches the loss differs"),
    (SingleSummed, "gradients", "all are 2 times ours"),
    (SingleNextBatch, "other batches", "the batch of step 2"),
    (SingleBeta2, "moments", "exp_avg_sq"),
    (SingleLate, "learning rate", "their schedule is 1 step late"),
]


@pytest.fixture(scope="module")
def single(documents: Path) -> tuple[Finished, Finished]:
    return Single(documents).run("ours"), SingleInDouble(documents).run("ours")


@pytest.mark.parametrize(("loop", "cause", "how"), ROUNDED, ids=[loop.__name__ for loop, *_ in ROUNDED])
def test_the_cause_is_named_in_float32(
    documents: Path, single: tuple[Finished, Finished], loop: type[Loop], cause: str, how: str
) -> None:
    ours, exact = single
    bounds = levels.float_bounds(ours, exact, "float32")  # type: ignore[arg-type]
    found = diagnose(evidence(exact, loop(documents).run("theirs"), bounds))
    assert found and found.cause == cause and how in found.how, found


# ---- from the first tensor that differs


@pytest.mark.parametrize(
    ("tensor", "cause"),
    [
        ("batch/tokens", "other batches"),
        ("start/embed.weight", "other starting weights"),
        ("activation/layers.0", "forward pass or loss"),
        ("scalar/loss", "forward pass or loss"),
        ("gradient/embed.weight", "gradients"),
        ("scalar/grad_norm", "gradients"),
        ("clipped/embed.weight", "clip"),
        ("exp_avg/embed.weight", "moments"),
        ("scalar/learning_rate", "learning rate"),
        ("weights/embed.weight", "update of the weights"),
    ],
)
def test_the_first_tensor_points_to_a_cause(tensor: str, cause: str) -> None:
    found = of_parting(Parting(3, tensor, 1e-3, 1e-10, 1e-14))
    assert (found.cause, found.step) == (cause, 3) and "step 3 is the first that differs" in found.how


def test_every_kind_of_tensor_has_a_cause() -> None:
    kinds = {kind for row in CAUSES for kind in row.kinds}
    assert STAGES.keys() <= kinds
