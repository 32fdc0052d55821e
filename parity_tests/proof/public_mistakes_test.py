"""Mistakes from public reports, planted in plain torch loops: named correctly, or reported as unknown."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.data import IGNORED
from parity_tests.proof import batches, rules
from parity_tests.proof.causes import Diagnosis, diagnose
from parity_tests.proof.causes_test import documents  # noqa: F401
from parity_tests.proof.evidence import UPDATE, Evidence, Rules, Search
from parity_tests.runs import compare
from parity_tests.validation.loops import STEPS, Finished, Loop
from torch_ref.families.layers import rotary


class Small(Loop):
    model = "llama of one layer"


class Tied(Small):
    model = "tied llama of one layer"


class ShiftedTwice(Small):
    """Targets already shifted are shifted again by the model's own loss."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, -2), targets[:, 1:].flatten(), ignore_index=IGNORED)


class MeanOverPadding(Small):
    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return super().loss(model, tokens, targets) * (targets != IGNORED).double().mean()


class PaddingTrained(Small):
    """Padding is trained on as a target."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        padding = tokens[targets == IGNORED].mode().values
        return super().loss(model, tokens, torch.where(targets == IGNORED, padding, targets))


class NotCausal(Small):
    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        def everywhere(*arguments: Any) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in arguments[:3])
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

        with patch("torch_ref.families.llama.attend", everywhere):
            return super().loss(model, tokens, targets)


class Dropout(Small):
    """Dropout after the embedding, which the model's config does not have."""

    def build(self) -> nn.Module:
        model = super().build()
        torch.manual_seed(0)
        model.get_submodule("embed").register_forward_hook(lambda m, x, y: functional.dropout(y, 0.1))
        return model


class Rope(Small):
    """A base of 500000 where the config has 10000."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        def other(config: Any, *arguments: Any, **more: Any) -> Any:
            return rotary(config.model_copy(update={"rope_theta": 500000.0}), *arguments, **more)

        with patch("torch_ref.families.llama.rotary", other):
            return super().loss(model, tokens, targets)


class NormEps(Small):
    def build(self) -> nn.Module:
        model = super().build()
        for module in model.modules():
            if hasattr(module, "eps"):
                setattr(module, "eps", 1e-6)  # noqa: B010
        return model


class NotDivided(Small):
    """Gradients of two microbatches are summed, and their losses averaged."""

    accumulation = 2

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        count, total = (targets != IGNORED).sum(), 0.0
        for t, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            loss = self.loss(model, t, y) * (y != IGNORED).sum() / count
            (loss * 2).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total


class SteppedEachMicrobatch(Small):
    accumulation = 2

    def rate(self, step: int) -> float:
        return super().rate(2 * step)


class Untied(Tied):
    """The head is a separately trained copy of the embedding."""

    def build(self) -> nn.Module:
        model = super().build()
        self.head = nn.Parameter(model.get_parameter("embed.weight").detach().clone())
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().optimizer(model)
        optimizer.add_param_group({"params": [self.head], "weight_decay": self.o.weight_decay})
        return optimizer

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        self.head.grad = None
        hidden: list[Tensor] = []
        hook = model.get_submodule("norm").register_forward_hook(lambda m, x, y: hidden.append(y))
        model(tokens)
        hook.remove()
        logits = hidden[0] @ self.head.T
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()


class ZeroedTooOften(Small):
    """Gradients are zeroed before each microbatch: only the last is applied."""

    accumulation = 2

    def backward(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
        count, total = (targets != IGNORED).sum(), 0.0
        for t, y in zip(tokens.chunk(2), targets.chunk(2), strict=True):
            model.zero_grad()
            loss = self.loss(model, t, y) * (y != IGNORED).sum() / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total


class LogitsRounded(Small):
    """Logits in bfloat16."""

    def loss(self, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens).bfloat16().double()
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


class WeightsRounded(Small):
    """Weights are rounded to bfloat16 after each update."""

    def settings(self, step: int) -> dict[str, float]:
        for p in self.parameters if step > 1 else ():
            p.data = p.data.bfloat16().double()
        return super().settings(step)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        self.parameters = list(model.parameters())
        return super().optimizer(model)


class EvalBatchBetween(Small):
    """Every fourth step trains on a batch after one that evaluation took from the same iterator."""

    def batch(self, step: int) -> tuple[Any, Any]:
        return super().batch(step + (step - 1) // 4)


NAMED: list[tuple[type[Loop], str, int, str]] = [
    (ShiftedTwice, "other batches", 1, "its targets one token too far"),
    (MeanOverPadding, "forward pass or loss", 1, "as a mean over all its tokens, padding counted"),
    (PaddingTrained, "other batches", 1, "the batch with its padding as targets too"),
    (NotCausal, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (Dropout, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (Rope, "forward pass or loss", 1, "with model.rope_theta = 500000"),
    (NormEps, "forward pass or loss", 1, "with model.norm_eps = 1e-06"),
    (NotDivided, "gradients", 1, "all are 2 times ours"),
    (SteppedEachMicrobatch, "learning rate", 1, "their schedule advances 2 steps a step"),
    (Untied, "gradients", 1, "a head that does not share the embedding's weights"),
    (ZeroedTooOften, "gradients", 1, "the sum over 2 microbatches"),
    (LogitsRounded, "forward pass or loss", 1, "from equal weights and batches the loss differs"),
    (WeightsRounded, UPDATE, 1, "none of"),
    (EvalBatchBetween, "other batches", 5, "the batch of step 6"),
]


@pytest.fixture(scope="module")
def right(documents: Path) -> Mapping[str, Finished]:  # noqa: F811
    return {loop.model: loop(documents).run("ours") for loop in (Small, Tied)}


def named(wrong: Loop, ours: Finished) -> Diagnosis | None:
    theirs, bounds = wrong.run("theirs"), {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}
    ours = Finished("ours", wrong.experiment, ours.metrics, ours.kept_at_the_end, ours.before)

    def batch(step: int) -> Search:
        losses = ours.metrics[step - 1]["loss"], theirs.metrics[step - 1]["loss"]
        return batches.identify(ours.experiment, ours.before[step], step, losses, bounds["loss"][step - 1])

    def rule(step: int) -> Rules:
        return rules.identify(ours.experiment, ours.before[1], step, (ours.metrics, theirs.metrics), bounds)

    start = {f"weights/{name}": w for name, w in ours.before[1].items()}
    return diagnose(Evidence(ours, theirs, bounds, start, batch, rule))  # type: ignore[arg-type]


@pytest.mark.parametrize(("loop", "cause", "step", "how"), NAMED, ids=[loop.__name__ for loop, *_ in NAMED])
def test_a_mistake_of_public_reports_is_named(
    documents: Path,  # noqa: F811
    right: Mapping[str, Finished],
    loop: type[Loop],
    cause: str,
    step: int,
    how: str,
) -> None:
    found = named(loop(documents), right[loop.model])
    assert found and (found.cause, found.step) == (cause, step) and how in found.how, found


@pytest.mark.parametrize("loop", [Small, Tied])
def test_a_right_loop_has_no_cause(documents: Path, right: Mapping[str, Finished], loop: type[Loop]) -> None:  # noqa: F811
    assert named(loop(documents), right[loop.model]) is None
