"""The optimizer: its update rule, the schedule of its rate, and what it keeps of each parameter."""

from typing import Literal

from pydantic import model_validator

from jaxdist.config.model import CountOrZero, Fraction, NotNegative, Positive, Section, Share

# What the update rule of an optimizer keeps of each parameter, beside the number of its updates, under torch's names.
STATES: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
EMA = "ema"  # what `optimizer.ema` keeps besides
KEPT = (*dict.fromkeys(kind for kinds in STATES.values() for kind in kinds), EMA)


class Optimizer(Section):
    """Torch's formulas: decay on tensors of two or more dimensions only, clip by the global norm."""

    name: Literal["adamw", "adam", "sgd", "lion"] = "adamw"
    """adamw, adam and sgd are torch.optim's of these names, lion is arXiv:2302.06675. Decay is decoupled in adamw and
    lion; in adam and sgd it is part of the gradient (L2)."""
    learning_rate: Positive = 5e-3
    """Peak learning rate."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up: step s uses learning_rate · s / warmup."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warm-up."""
    decay_steps: CountOrZero = 0
    """Step at which the decay ends; 0: train.steps."""
    final: Share = 0.1
    """Learning rate at the end of the decay, as a share of the peak."""
    beta1: Fraction = 0.9
    """Decay of Adam's first moment; of lion's within an update."""
    beta2: Fraction = 0.95
    """Decay of Adam's second moment; of lion's from step to step."""
    eps: Positive = 1e-8
    """Added to the root of Adam's second moment."""
    momentum: Fraction = 0.9
    """Decay of sgd's momentum; 0 for none."""
    nesterov: bool = False
    """sgd steps along what its momentum will be."""
    ema: Fraction = 0.0
    """Decay of an exponential moving average of the weights, as torch's AveragedModel keeps one; 0 for none."""
    weight_decay: NotNegative = 0.1
    """Weight decay, on tensors of two or more dimensions."""
    clip: NotNegative = 1.0
    """Largest global gradient norm; 0 for no clip."""

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "Optimizer":
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov = true with optimizer.momentum = 0.0: give a momentum, as 0.9")
        return self

    @property
    def kept(self) -> tuple[str, ...]:
        """What is kept of each parameter, under torch's names."""
        without = self.name == "sgd" and not self.momentum
        return (() if without else STATES[self.name]) + ((EMA,) if self.ema else ())

    @property
    def has_eps(self) -> bool:
        """Whether the rule divides by the root of a second moment, to which `eps` is added."""
        return "exp_avg_sq" in STATES[self.name]

    def landmarks(self, steps: int) -> list[int]:
        """Steps of a run of `steps` by whose learning rates schedules are told apart."""
        end = self.decay_steps or steps
        told = {1, self.warmup, self.warmup + 1, end // 4, end // 2, 3 * end // 4, end}
        return sorted(step for step in told if step >= 1)
