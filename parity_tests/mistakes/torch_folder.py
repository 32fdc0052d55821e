"""The mistakes of one device once more, each in a run in float32 that is all there is of the other side: the run folder
of another loop (`--against RUN_DIR`), whose float64 levels have nothing to compare.
"""

from dataclasses import replace
from typing import Any

from parity_tests.mistakes import KNOWN, mistake, plant
from torch_ref import optim

CONFIGURATION = "run folder"
NONE_IN_FLOAT32 = {"torch_ref.softmax_in_float32", "torch_ref.norms_in_float32"}

for row in list(KNOWN.values()):  # the tables before this one have been entered
    on_one_device = (row.side, row.configuration, row.level) == ("torch_ref", "llama", "mathematics")
    if on_one_device and row.name not in NONE_IN_FLOAT32:
        name = f"{row.name}_in_a_run_folder"
        KNOWN[name] = replace(row, name=name, configuration=CONFIGURATION, level="precision")


@mistake("torch_ref", CONFIGURATION, "precision", "weights/*")
def rate_a_thousandth_higher_than_told() -> None:
    """The optimizer steps with a learning rate that is 0.1 % higher than the one that is logged."""
    right = optim.AdamW.step

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

    plant(optim.AdamW, "step", step)
