"""Identifies the update rule by which a loop left our weights: tries other rules until one gives its next losses."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from jaxdist.config import Experiment, Optimizer
from jaxdist.config.optimizer import ParamRole
from jaxdist.data import IGNORED, Batches, dataset_of
from jaxdist.runs.display import say
from parity_tests.proof.batches import LONG, filled, mean_losses, parts_of
from parity_tests.proof.evidence import UPDATE, Rules
from parity_tests.runs.compare import Records
from torch_ref.training.optim import clip, learning_rate
from torch_ref.training.step import losses

MOST = 8  # steps up to which an update is searched: gradients of all steps before it are held
CONFIRMED = 2  # further steps whose losses and gradient norms a rule has to give
ROUND = 1e-11  # of two float64 losses after a few updates by one rule
EPS = tuple(10.0**-n for n in range(3, 17))
BETA1, BETA2 = (0.8, 0.85, 0.95, 0.99, 0.0), (0.9, 0.98, 0.99, 0.995, 0.999, 0.9999)
RATES = (2.0, 0.5, 10.0, 0.1, 4.0, 0.25, 8.0, 0.125)
DECAYS = (0.0, 0.1, 0.01, 0.001, 0.05, 0.2, 1.0)
COMMON = (0.9, 0.999)  # betas that torch.optim has where none are given
MOMENTS, DECAY = "moments", "weight decay"
SINGLE = "nadam of single"  # torch keeps the product of NAdam's momenta in its default dtype
FORMS = {"nadam": "NAdam", SINGLE: "NAdam", "amsgrad": "AMSGrad", "radam": "RAdam", "adamax": "Adamax"}

Past = Sequence[tuple[np.ndarray, np.ndarray]]  # a parameter and its clipped gradient, of each step until the update


class Rule(NamedTuple):
    """Adam's rule with everything that loops do otherwise. eps_at: what eps is added to."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    coupled: bool  # decay is part of the gradient (L2)
    form: str = "adam"  # or one of FORMS
    eps_at: str = "corrected"  # the root after the bias correction; "uncorrected", before it; or "square", in the root
    first: bool = True  # whether the first moment is bias-corrected
    second: bool = True
    vectors: bool = False  # whether vectors decay too
    scaled: bool = True  # whether the learning rate multiplies the decay
    late: bool = False  # decay of the updated weight
    factor: float = 1.0  # of the learning rate


class Candidate(NamedTuple):
    """A rule, in words, and the cause that a difference by it is."""

    name: str
    cause: str
    rule: Rule


def updated(past: Past, rate: float, rule: Rule, matrix: bool) -> np.ndarray:
    """The parameter after the last gradient. Formulas: torch.optim's Adam, AdamW, NAdam, RAdam and Adamax."""
    decay = rule.decay if matrix or rule.vectors else 0.0
    b1, b2, rate = rule.beta1, rule.beta2, rate * rule.factor
    m = v = largest = most = np.zeros_like(past[0][0])
    product = mu = 1.0
    for step, (weight, gradient) in enumerate(past, 1):
        g = gradient + decay * weight if rule.coupled else gradient
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        largest, most = np.maximum(largest, v), np.maximum(b2 * most, np.abs(g) + rule.eps)
        mu = b1 * (1 - 0.5 * 0.96 ** (0.004 * step))
        product = float(np.float32(product) * np.float32(mu)) if rule.form == SINGLE else product * mu
    t, weight = len(past), past[-1][0]
    c1, c2 = 1 - b1**t if rule.first else 1.0, 1 - b2**t if rule.second else 1.0
    squares = largest if rule.form == "amsgrad" else v
    if rule.eps_at == "square":
        root = np.sqrt(squares / c2 + rule.eps)
    elif rule.eps_at == "uncorrected":
        root = (np.sqrt(squares) + rule.eps) / np.sqrt(c2)
    else:
        root = np.sqrt(squares / c2) + rule.eps
    if rule.form in ("nadam", SINGLE):
        after = b1 * (1 - 0.5 * 0.96 ** (0.004 * (t + 1)))
        step_by = ((1 - mu) / (1 - product) * g + after / (1 - product * after) * m) / root
    elif rule.form == "adamax":
        step_by = m / c1 / most
    elif rule.form == "radam":
        most_terms = 2 / (1 - b2) - 1
        terms = most_terms - 2 * t * b2**t / (1 - b2**t)
        step_by = m / c1
        if terms > 5:
            share = (terms - 4) * (terms - 2) * most_terms / ((most_terms - 4) * (most_terms - 2) * terms)
            step_by = step_by * np.sqrt(share * c2) / (np.sqrt(v) + rule.eps)
    else:
        step_by = m / c1 / root
    kept = 1.0 if rule.coupled else 1 - decay * (rate if rule.scaled else 1.0)
    return (weight - rate * step_by) * kept if rule.late else weight * kept - rate * step_by


def candidates(o: Optimizer) -> Iterator[Candidate]:
    """The rules that loops have in place of ours, which is `adam` or `adamw`."""
    own = Rule(o.beta1, o.beta2, o.eps, o.weight_decay, o.name == "adam")
    for eps in EPS:
        if not np.isclose(eps, o.eps, rtol=1e-6):
            yield Candidate(f"with eps {eps:g}", UPDATE, own._replace(eps=eps))
        yield Candidate(f"with eps {eps:g} inside the root", UPDATE, own._replace(eps=eps, eps_at="square"))
    early = "with eps added to the root before its bias correction"
    yield Candidate(early, UPDATE, own._replace(eps_at="uncorrected"))
    yield Candidate("without bias correction", UPDATE, own._replace(first=False, second=False))
    yield Candidate("without bias correction of the first moment", UPDATE, own._replace(first=False))
    yield Candidate("without bias correction of the second moment", UPDATE, own._replace(second=False))
    for rate in RATES:
        yield Candidate(f"with {rate:g} times the logged learning rate", UPDATE, own._replace(factor=rate))

    def decays(rule: Rule, values: tuple[float, ...]) -> Iterator[tuple[str, Rule]]:
        for decay in values:
            if decay != o.weight_decay:
                yield f"weight decay {decay:g}", rule._replace(decay=decay)
        kind = "decoupled weight decay" if rule.coupled else "weight decay in the gradient (coupled, L2)"
        for decay in dict.fromkeys((o.weight_decay, 0.01)):
            yield f"{kind} of {decay:g}", rule._replace(coupled=not rule.coupled, decay=decay)

    for how, rule in decays(own, DECAYS):
        yield Candidate(f"with {how}", DECAY, rule)
    yield Candidate("with weight decay of vectors too", DECAY, own._replace(vectors=True))
    if o.weight_decay and not own.coupled:
        unscaled = "with weight decay that the learning rate does not multiply"
        yield Candidate(unscaled, DECAY, own._replace(scaled=False))
        yield Candidate("with weight decay of the updated weights", DECAY, own._replace(late=True))
    for beta in BETA1:
        if beta != o.beta1:
            yield Candidate(f"with beta1 {beta:g}", MOMENTS, own._replace(beta1=beta))
    for beta in BETA2:
        if beta != o.beta2:
            yield Candidate(f"with beta2 {beta:g}", MOMENTS, own._replace(beta2=beta))
    if o.beta1 != o.beta2:
        swapped = own._replace(beta1=o.beta2, beta2=o.beta1)
        yield Candidate("with beta1 and beta2 swapped", MOMENTS, swapped)
    betas = dict.fromkeys(((o.beta1, o.beta2), COMMON))
    for form, title in FORMS.items():
        for b1, b2 in betas:
            rule = own._replace(form=form, beta1=b1, beta2=b2)
            other = "" if (b1, b2) == (o.beta1, o.beta2) else f" with betas {b1:g} and {b2:g}"
            yield Candidate(f"by {title}{other}", UPDATE, rule)
            for how, decayed in decays(rule, (0.0, 0.01)):
                yield Candidate(f"by {title}{other} with {how}", UPDATE, decayed)


class Training:
    """Our loop in float64 on one device, from given weights, whose update after some step may be by another rule."""

    def __init__(self, experiment: Experiment, model: torch.nn.Module):
        self.experiment, self.model, self.data = experiment, model, dataset_of(experiment)
        self.batches: dict[int, Batches] = {}
        self.matrix = {name: ParamRole.in_torch(name, p.ndim).matrix for name, p in model.named_parameters()}
        self.past: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in self.matrix}

    def fill(self, weights: Mapping[str, np.ndarray]) -> None:
        """Sets the parameters."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.from_numpy(weights[name]))

    def batch(self, step: int) -> Batches:
        """The batch of a step; kept, as each is needed often."""
        train = self.experiment.train
        if step not in self.batches:
            self.batches[step] = self.data.batch(step, train.batch, train.seed)
        return self.batches[step]

    def loss(self, step: int) -> float:
        """The mean loss on the batch of a step, in nats per valid token or image."""
        return mean_losses(self.model, self.batch(step), self.experiment)[""]

    def gradients(self, step: int) -> float:
        """Adds the weights of now and their clipped gradients on a step's batch to the past; returns the norm."""
        parts = parts_of(self.batch(step), self.experiment)
        self.model.zero_grad(set_to_none=True)
        count = sum((part.targets != IGNORED).sum() for part in parts)
        for part in parts:
            total, added = losses(self.model, part, 1)
            (total / count + added / len(parts)).backward()  # type: ignore[no-untyped-call]
        norm = float(clip(self.model.parameters(), self.experiment.optimizer.clip))
        for name, p in self.model.named_parameters():
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            self.past[name].append((p.detach().numpy().copy(), gradient.numpy().copy()))
        return norm

    def after(self, step: int, rule: Rule) -> dict[str, np.ndarray]:
        """The weights after a step's update."""
        rate = learning_rate(self.experiment.optimizer, self.experiment.train.steps, step)
        return {name: updated(past, rate, rule, self.matrix[name]) for name, past in self.past.items()}


def identify(
    experiment: Experiment,
    weights: Mapping[str, np.ndarray],
    step: int,
    metrics: tuple[Records, Records],
    bounds: Mapping[str, np.ndarray],
) -> Rules:
    """The rules by which the update of `step`, and of those after it, gives their losses and gradient norms.

    weights: at the start, by torch's names. metrics: records of ours and theirs. Our own rule has to reproduce ours
    first, and not theirs; else nothing is tried, as for optimizers other than Adam.
    """
    o = experiment.optimizer
    if o.name not in ("adam", "adamw") or step > MOST or step >= len(metrics[0]) or experiment.train.skip:
        return Rules()
    if (model := filled(experiment.model, weights)) is None or any(True for _ in model.buffers()):
        return Rules()
    own = Rule(o.beta1, o.beta2, o.eps, o.weight_decay, o.name == "adam")

    def agrees(run: Records, field: str, at: int, value: float) -> bool:
        near = max(ROUND, float(bounds[field][at - 1]))
        return abs(value - run[at - 1][field]) <= near * abs(run[at - 1][field])

    training, begin = Training(experiment, model), time.monotonic()
    for s in range(1, step + 1):
        training.gradients(s)
        training.fill(training.after(s, own))
    reached = training.loss(step + 1)
    if not agrees(metrics[0], "loss", step + 1, reached) or agrees(metrics[1], "loss", step + 1, reached):
        return Rules()
    tried, pace = list(candidates(o)), (time.monotonic() - begin) / (3 * step + 1)
    if (seconds := pace * len(tried)) > LONG:
        say(f"comparing the loss of step {step + 1} with those of {len(tried)} update rules, about {seconds:.0f} s ...")

    def follows(candidate: Candidate, last: int) -> bool:
        """Whether a rule gives their losses up to step `last`, and the gradient norms before it."""
        length = {name: len(past) for name, past in training.past.items()}
        try:
            for s in range(step, last):
                training.fill(training.after(s, candidate.rule))
                if not agrees(metrics[1], "loss", s + 1, training.loss(s + 1)):
                    return False
                if s + 1 < last and not agrees(metrics[1], "grad_norm", s + 1, training.gradients(s + 1)):
                    return False
            return True
        finally:
            for name, past in training.past.items():
                del past[length[name] :]

    near = [candidate for candidate in tried if follows(candidate, step + 1)]
    last = min(step + 1 + CONFIRMED, len(metrics[0]))
    found = [candidate for candidate in near if follows(candidate, last)]
    return Rules(tuple(dict.fromkeys((c.name, c.cause) for c in found)), len(tried), tuple(c.name for c in near))
