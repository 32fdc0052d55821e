"""A right training loop in plain torch, and variants with one mistake each, to test the verdict's causes."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.config import Experiment
from jaxdist.data import IGNORED, dataset_of
from torch_ref.families.layers import rotary
from torch_ref.families.models import build
from torch_ref.parallel.weights import draw, fill, model_tensors

STEPS = 12
SMALL = {"family": "llama", "layers": 1, "dim": 16, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "heads": 4, "kv_heads": 2, "head_dim": 8},
    "llama of one layer": SMALL,
    "tied llama of one layer": SMALL | {"tied": True},
    "gpt2": {"family": "gpt2", "heads": 4, "init_std": 0.1},
    "gpt2 of small weights": {"family": "gpt2", "heads": 4},
}


def experiment(documents: Path, model: str, clip: float, **train: Any) -> Experiment:
    values = {
        "model": {"layers": 2, "dim": 32, "hidden": 64, "vocab": 256, "positions": 64} | MODELS[model],
        "data": {"path": str(documents), "sequence": 48, "documents": "padded"},
        "train": {"steps": STEPS, "batch": 8} | train,
        "optimizer": {"learning_rate": 0.003, "warmup": 4, "clip": clip},
    }
    return Experiment.parse(values, source="test")


@dataclass
class Finished:
    """The part of a run that the evidence reads."""

    side: str
    experiment: Experiment
    metrics: list[dict[str, Any]] = field(default_factory=list)
    kept_at_the_end: dict[str, np.ndarray] = field(default_factory=dict)
    before: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)  # of step 1, by the names of a record

    @property
    def gradient_steps(self) -> list[int]:
        return [1] if self.gradients else []

    @property
    def state_kinds(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self.kept_at_the_end})

    def kept_states(self, kind: str) -> dict[str, np.ndarray]:
        return {name: w for name, w in self.kept_at_the_end.items() if name.startswith(f"{kind}/")}

    def kept(self, kind: str, step: int) -> dict[str, np.ndarray]:
        if kind == "start":
            return {f"start/{name}": w for name, w in self.before.get(step, {}).items()}
        return self.gradients if (kind, step) == ("gradient", 1) else {}


class Loop:
    """A correct loop; subclasses override the method in which they are wrong."""

    accumulation = 1
    records = False  # gradients of step 1
    model = "llama"
    dtype = torch.float64

    def __init__(self, documents: Path, clip: float = 0.5) -> None:
        self.experiment = experiment(documents, self.model, clip, accumulation=self.accumulation)
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

    def settings(self, step: int) -> dict[str, float]:
        """Settings of all parameter groups at a step."""
        return {"lr": self.rate(step)}

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
            finished.before[step] = {name: w.detach().numpy().copy() for name, w in model_tensors(model)}
            for group in optimizer.param_groups:
                group |= self.settings(step)
            optimizer.zero_grad()
            loss = self.backward(model, *(torch.from_numpy(part).long() for part in self.batch(step)))
            if self.records and step == 1:
                gradients = ((name, p.grad) for name, p in model.named_parameters())
                finished.gradients = {f"gradient/{name}": g.numpy().copy() for name, g in gradients if g is not None}
            loss, norm = self.logged(loss, self.clip(model))
            optimizer.step()
            rate = self.logged_rate(step)
            finished.metrics.append({"step": step, "loss": loss, "grad_norm": norm, "learning_rate": rate})
        for name, parameter in model.named_parameters():
            kept = {"weights": parameter.detach(), **optimizer.state[parameter]}
            finished.kept_at_the_end |= {f"{k}/{name}": w.numpy() for k, w in kept.items() if w.ndim}
        return finished


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


class ClippedByValue(NeverClipped):
    """Each number of a gradient is clipped separately."""

    def clip(self, model: nn.Module) -> float:
        norm = super().clip(model)
        nn.utils.clip_grad_value_(model.parameters(), self.o.clip / 50)
        return norm


class ClippedByGroup(NeverClipped):
    """Matrices and vectors are clipped by separate norms."""

    def clip(self, model: nn.Module) -> float:
        norm, parameters = super().clip(model), list(model.parameters())
        for matrices in (True, False):
            nn.utils.clip_grad_norm_([p for p in parameters if (p.ndim >= 2) is matrices], self.o.clip)
        return norm


class OtherClip(Loop):
    def clip(self, model: nn.Module) -> float:
        return nn.utils.clip_grad_norm_(model.parameters(), 1.002 * self.o.clip).item()


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


class LongWarmup(Loop):
    def rate(self, step: int) -> float:
        return self.o.learning_rate * step / 8 if step < 8 else super().rate(step)


class LastMicrobatchDropped(Loop):
    """The gradient of the last microbatch is not added."""

    accumulation = 4

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        count, total = (targets != IGNORED).sum(), 0.0
        for i, (t, y) in enumerate(zip(tokens.chunk(4), targets.chunk(4), strict=True)):
            loss = self.loss(model, t, y) * (y != IGNORED).sum() / count
            total += loss.item()
            if i < 3:
                loss.backward()  # type: ignore[no-untyped-call]
        return total


class NeverZeroed(Loop):
    """Gradients are added to those of earlier steps."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
        return optimizer


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
    """A penalty on the logits is trained, but not in the logged loss."""

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
        def rounded(*arguments: Any, **more: Any) -> Any:
            return tuple(table.bfloat16().to(self.dtype) for table in rotary(*arguments, **more))

        with patch("torch_ref.families.llama.rotary", rounded):
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


class NoDecayFromTwo(Loop):
    """No weight decay from step 2 on."""

    def settings(self, step: int) -> dict[str, float]:
        return super().settings(step) | ({"weight_decay": 0.0} if step > 1 else {})


class Beta1(Loop):
    def betas(self) -> tuple[float, float]:
        return 0.8, self.o.beta2


class Beta2(Loop):
    def betas(self) -> tuple[float, float]:
        return self.o.beta1, 0.999


class SwappedBetas(Loop):
    def betas(self) -> tuple[float, float]:
        return self.o.beta2, self.o.beta1


class NoDecay(Loop):
    def settings(self, step: int) -> dict[str, float]:
        return super().settings(step) | {"weight_decay": 0.0}


class Coupled(Loop):
    """Weight decay is added to the gradient, as torch.optim.Adam does."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = super().optimizer(model).param_groups
        kept = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
        return torch.optim.Adam(kept, lr=1.0, betas=self.betas(), eps=self.eps())


class Eps(Loop):
    def eps(self) -> float:
        return 1e-5


class EpsFromTwo(Loop):
    """Another eps from step 2 on."""

    def settings(self, step: int) -> dict[str, float]:
        return super().settings(step) | {"eps": 1e-5 if step > 1 else self.o.eps}


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


class Single(Loop):
    model = "gpt2"
    dtype = torch.float32


class SingleInDouble(Single):
    dtype = torch.float64


class ExactGelu(Single):
    """The exact GELU where the model has the tanh approximation."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        gelu = functional.gelu
        with patch.object(functional, "gelu", lambda x, approximate: gelu(x)):
            return super().loss(model, tokens, targets)


class SingleSummed(Single, Summed): ...


class SingleNextBatch(Single, NextBatch): ...


class SingleBeta2(Single, Beta2): ...


class SingleLate(Single, StepLate): ...


class SingleBeta1(Single, Beta1): ...


class SingleNoDecay(Single, NoDecay): ...


class SingleClippedByGroup(Single, ClippedByGroup): ...


class SmallExactGelu(ExactGelu):
    """With weights so small that the loss of step 1 differs by no more than rounding."""

    model = "gpt2 of small weights"
    records = True


class SmallSingle(Single):
    model = "gpt2 of small weights"
    records = True


class SmallInDouble(SmallSingle):
    dtype = torch.float64


class SmallEps(SmallSingle, Eps): ...


class SmallExactInDouble(SmallExactGelu):
    dtype = torch.float64
