"""The strategies of data parallelism, one row each: which model state data-parallel devices shard."""

from dataclasses import dataclass

from jaxdist.config.errors import ConfigError
from jaxdist.config.registry import BUILT_IN, Registry, registrant


@dataclass(frozen=True)
class Strategy:
    """Which of parameters, gradients and optimizer state are sharded over `fsdp`; the others are replicated on it.

    torch has DDP and ZeroRedundancyOptimizer where parameters and gradients are replicated, else FSDP2.
    """

    name: str
    """Value of `parallel.strategy`."""
    parameters: bool
    gradients: bool
    optimizer: bool
    reshards: bool = False
    """Whether sharded parameters are gathered each time they are used, or once a step."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a combination that no update can be made from."""
        if (self.parameters or self.gradients) and not self.optimizer:
            raise ConfigError(
                f"strategy {self.name!r}: parameters or gradients are sharded and the optimizer's state is not, which "
                "is updated where the others are; shard it too: optimizer=True"
            )
        if self.reshards and not self.parameters:
            raise ConfigError(
                f"strategy {self.name!r}: reshards=True without sharded parameters, which alone are gathered; leave it "
                "out, or shard them: parameters=True"
            )

    @property
    def replicates(self) -> bool:
        """Whether parameters and gradients are replicated on each device."""
        return not (self.parameters or self.gradients)

    @property
    def splits_update(self) -> bool:
        """Whether each device updates its part of parameters that are replicated."""
        return self.replicates and self.optimizer


STRATEGIES: Registry[Strategy] = Registry("strategy", Strategy)


def register_strategy(row: Strategy) -> None:
    """Make a strategy known to both sides. Raises ConfigError for a name that is taken."""
    STRATEGIES.register(row, registrant())


# Bytes a device sends per step over n devices, P parameter bytes (ring algorithms):
for _row in (
    # 2P(n-1)/n: one all-reduce. torch: DistributedDataParallel
    Strategy("ddp", parameters=False, gradients=False, optimizer=False),
    # 2P(n-1)/n: one reduce-scatter, one all-gather. torch: ZeroRedundancyOptimizer; DeepSpeed stage 1
    Strategy("zero1", parameters=False, gradients=False, optimizer=True),
    # (1+m)P(n-1)/n with m microbatches: a reduce-scatter each, one all-gather. DeepSpeed stage 2: parameters stay
    # unsharded at rest, where fsdp with reshard_after_forward=false gathers them at the start of each step instead.
    Strategy("zero2", parameters=False, gradients=True, optimizer=True),
    # At most 3P(n-1)/n per microbatch: all-gather forward and backward, reduce-scatter. torch: FSDP2; DeepSpeed stage 3
    Strategy("fsdp", parameters=True, gradients=True, optimizer=True, reshards=True),
):
    STRATEGIES.register(_row, BUILT_IN)
