"""Plain torch loops with one mistake in the update rule: the losses identify the rule."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from parity_tests.proof import batches, rules
from parity_tests.proof.causes import Diagnosis, diagnose
from parity_tests.proof.causes_test import documents, often  # noqa: F401
from parity_tests.proof.evidence import UPDATE, Evidence, Rules, Search
from parity_tests.runs import compare
from parity_tests.validation import loops
from parity_tests.validation.loops import STEPS, Finished, Loop


class Own(torch.optim.Optimizer):
    """A handwritten rule: `form` computes the direction from the moments of step t."""

    def __init__(self, groups: Any, form: Any, betas: tuple[float, float]):
        super().__init__(groups, {"lr": 1.0, "betas": betas, "weight_decay": 0.0})
        self.form = form

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                assert p.grad is not None
                if not (s := self.state[p]):
                    s |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p), "t": torch.zeros(())}
                s["t"] += 1
                s["exp_avg"].lerp_(p.grad, 1 - b1)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self.form(s["exp_avg"], s["exp_avg_sq"], int(s["t"]), b1, b2))


class ByHand(Loop):
    """An update in the direction of `form`."""

    def form(self, m: Any, v: Any, t: int, b1: float, b2: float) -> Any:
        return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + self.eps())

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = super().optimizer(model).param_groups
        kept = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
        return Own(kept, self.form, self.betas())


class NoBiasCorrection(ByHand):
    def form(self, m: Any, v: Any, t: int, b1: float, b2: float) -> Any:
        return m / (v.sqrt() + self.eps())


class EpsInside(ByHand):
    def form(self, m: Any, v: Any, t: int, b1: float, b2: float) -> Any:
        return m / (1 - b1**t) / (v / (1 - b2**t) + self.eps()).sqrt()


class EpsEarly(ByHand):
    def form(self, m: Any, v: Any, t: int, b1: float, b2: float) -> Any:
        return m / (1 - b1**t) * (1 - b2**t) ** 0.5 / (v.sqrt() + self.eps())


class Unknown(ByHand):
    def form(self, m: Any, v: Any, t: int, b1: float, b2: float) -> Any:
        return m / (1 - b1**t) / (v / (1 - b2**t)).pow(0.4)


class Replaced(Loop):
    """Another class of torch.optim with the same groups and settings."""

    kind: Any = torch.optim.AdamW
    more: Mapping[str, Any] = MappingProxyType({})

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = super().optimizer(model).param_groups
        kept = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
        settings: dict[str, Any] = {"lr": 1.0, "betas": self.betas(), "eps": self.eps()}
        return self.kind(kept, **settings | dict(self.more))  # type: ignore[no-any-return]


class AMSGrad(Replaced):
    more = MappingProxyType({"amsgrad": True})


class NAdam(Replaced):
    kind = torch.optim.NAdam


class NAdamDecoupled(NAdam):
    more = MappingProxyType({"decoupled_weight_decay": True})


class NAdamOfDefaults(NAdam):
    more = MappingProxyType({"betas": (0.9, 0.999)})


class RAdam(Replaced):
    kind = torch.optim.RAdam


COUPLED = "weight decay in the gradient (coupled, L2) of 0.1"
NAMED = [
    (loops.Eps, UPDATE, 1, "an update with eps 1e-05 gives"),
    (NAdamOfDefaults, UPDATE, 1, f"an update by NAdam with betas 0.9 and 0.999 with {COUPLED} gives"),
    (Unknown, UPDATE, 1, "other rules tried gives their losses"),
    (loops.EpsFromTwo, UPDATE, 2, "an update with eps 1e-05 gives"),
    (EpsInside, UPDATE, 1, "an update with eps 1e-08 inside the root gives"),
    (EpsEarly, UPDATE, 1, "with eps added to the root before its bias correction gives"),
    (NoBiasCorrection, UPDATE, 1, "an update without bias correction gives"),
    (AMSGrad, UPDATE, 2, "an update by AMSGrad gives"),
    (NAdamDecoupled, UPDATE, 1, "an update by NAdam gives"),
    (RAdam, UPDATE, 1, f"an update by RAdam with {COUPLED} or by RAdam with betas 0.9 and 0.999 with"),
    (loops.RateAppliedTwice, UPDATE, 1, "with 2 times the logged learning rate gives"),
    (loops.NoDecay, rules.DECAY, 1, "an update with weight decay 0 gives"),
    (loops.Coupled, rules.DECAY, 1, f"an update with {COUPLED} gives"),
    (loops.EmbeddingNotDecayed, rules.DECAY, 1, "embed.weight of theirs differs"),
    (loops.Beta2, rules.MOMENTS, 2, "an update with beta2 0.999 gives"),
    (loops.SwappedBetas, rules.MOMENTS, 2, "an update with beta1 and beta2 swapped gives"),
    (loops.NeverClipped, "clip", 1, "as if the clip of 0.5 were not applied"),
]


def small(loop: type[Loop]) -> type[Loop]:
    """The loop with a model of one layer, as a search tries a hundred rules."""
    return type(loop.__name__, (loop,), {"model": "llama of one layer"})


@pytest.fixture(scope="module")
def right(documents: Path) -> Finished:  # noqa: F811
    return small(Loop)(documents).run("ours")


def named(wrong: Loop, right: Finished) -> Diagnosis | None:
    ours, theirs = replace(right, experiment=wrong.experiment), wrong.run("theirs")
    bounds = {n: np.full(STEPS, floor) for n, floor in compare.FLOOR.items()}

    def batch(step: int) -> Search:
        losses = ours.metrics[step - 1]["loss"], theirs.metrics[step - 1]["loss"]
        return (
            batches.identify(ours.experiment, ours.before[step], step, losses, compare.LOSS) if step == 1 else Search()
        )

    def rule(step: int) -> Rules:
        return rules.identify(ours.experiment, ours.before[1], step, (ours.metrics, theirs.metrics), bounds)

    start = {f"weights/{name}": w for name, w in ours.before[1].items()}
    return diagnose(Evidence(ours, theirs, bounds, start, batch, rule))  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.parametrize(("loop", "cause", "step", "how"), often(NAMED, each=3))
def test_the_rule_of_the_update_is_named(
    documents: Path,  # noqa: F811
    right: Finished,
    loop: type[Loop],
    cause: str,
    step: int,
    how: str,
) -> None:
    found = named(small(loop)(documents), right)
    assert found and (found.cause, found.step) == (cause, step) and how in found.how, found


def test_a_right_rule_by_hand_has_no_cause(documents: Path, right: Finished) -> None:  # noqa: F811
    assert named(small(ByHand)(documents), right) is None


class SmallEpsInDouble(loops.SmallInDouble, loops.Eps): ...


@pytest.mark.long
@pytest.mark.parametrize(
    ("loop", "cause", "how"),
    [
        (loops.SmallExactInDouble, "forward pass or loss", "it is the loss of this batch with model.gelu = exact"),
        (SmallEpsInDouble, UPDATE, "an update with eps 1e-05 gives"),
    ],
)
def test_a_run_in_fp64_names_what_float32_hides(
    documents: Path,  # noqa: F811
    loop: type[Loop],
    cause: str,
    how: str,
) -> None:
    """The verdict of `causes_test` advises this for the same loops in float32 without gradients."""
    found = named(loop(documents), loops.SmallInDouble(documents).run("ours"))
    assert found and (found.cause, found.step) == (cause, 1) and how in found.how, found
