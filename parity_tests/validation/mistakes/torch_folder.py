"""Mistakes of a loop in float32 of which a run folder is all there is, beside those of one device (`in_a_folder`)."""

from typing import Any

from parity_tests.validation.mistakes import FOLDER, mistake, plant
from torch_ref.training import optim


@mistake("torch_ref", FOLDER, "precision", "weights/*")
def rate_a_thousandth_higher_than_told() -> None:
    """The optimizer steps with a learning rate that is 0.1 % higher than the one that is logged."""
    right = optim.Optimizer.step

    def step(self: Any, *inputs: Any) -> float:
        plain = self.optimizer.step

        def higher() -> None:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.001
            plain()

        self.optimizer.step = higher
        rate = right(self, *inputs)
        self.optimizer.step = plain
        return rate

    plant(optim.Optimizer, "step", step)
