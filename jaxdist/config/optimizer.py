"""The optimizer: its update rule, the schedule of its rate, and what it keeps of each parameter."""

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from jaxdist.config.errors import ConfigError
from jaxdist.config.names import OneOf
from jaxdist.config.plugins import running
from jaxdist.config.registry import BUILT_IN, Reference, Registry, registrant
from jaxdist.config.section import NUMBER, Count, CountOrZero, Fraction, NotNegative, Positive, Section, Share


class ParamRole(NamedTuple):
    """The role of a parameter, by which update rules tell parameters apart: `matrix`, two or more dimensions without
    that of layers; `block`, part of a block."""

    matrix: bool
    block: bool

    @classmethod
    def in_torch(cls, name: str, dims: int) -> Self:
        """The role of a torch parameter by name, where blocks are numbered modules, and number of dimensions."""
        return cls(dims >= 2, re.search(r"\.\d+\.", name) is not None)

    @property
    def inner(self) -> bool:
        """A matrix of a block: neither embedding nor head."""
        return self.matrix and self.block


AppliesTo = Callable[[ParamRole], bool]
ALL: AppliesTo = lambda role: True  # noqa: E731
MATRICES: AppliesTo = lambda role: role.matrix  # noqa: E731
VECTORS: AppliesTo = lambda role: not role.matrix  # noqa: E731
INNER: AppliesTo = lambda role: role.inner  # noqa: E731
OUTER: AppliesTo = lambda role: not role.inner  # noqa: E731
ENDS: AppliesTo = lambda role: role.matrix and not role.block  # noqa: E731

ROWS, COLUMNS = "row_var", "col_var"  # states with one number per row, and per column
REDUCED_DIMS = {ROWS: -1, COLUMNS: -2}  # the dimension, in torch's order, over which they are means
EMA = "ema"  # the state of `optimizer.ema`


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer as jaxdist knows it. `torch_ref.UpdateRule` is the row of its twin."""

    name: str
    """Value of `optimizer.name`."""
    states: Mapping[str, AppliesTo]
    """State beside the number of updates, under torch's names, and the parameters that have it."""
    rule: Reference | None = None
    """The function of an update (`jaxdist.training.optim.Rule`)."""
    coupled: bool = False
    """Whether weight decay is added to the gradient (L2), and not to the update."""
    squares: tuple[str, ...] = ()
    """The `states` that are means of squares, and so never below zero."""
    stateless: Callable[["Optimizer"], bool] = lambda o: False
    """Whether it keeps nothing under these settings."""
    traffic: Reference | None = None
    """Traffic of the update (`jaxdist.accounting.traffic.update_traffic`); None: none of an elementwise rule, else
    unknown."""
    elementwise: bool | None = None
    """Whether each number of a parameter is updated by its own gradient and state alone; None: if every parameter has
    all states."""
    matrices_alone: bool = False
    """Whether image models, whose kernels are not matrices, are refused."""

    def __post_init__(self) -> None:
        """Raises ConfigError for states that are no mapping to functions."""
        if not (isinstance(self.states, Mapping) and all(map(callable, self.states.values()))):
            raise ConfigError(
                f"optimizer {self.name!r}: states = {reprlib.repr(self.states)}; give a mapping of their names to the "
                "parameters that have them, as {'exp_avg': jaxdist.config.ALL}"
            )
        for state, applies_to in self.states.items():
            if not (isinstance(state, str) and state.isidentifier() and state != EMA):
                raise ConfigError(
                    f"optimizer {self.name!r}: states[{state!r}]: give an identifier as name, other than {EMA!r}, the "
                    "state of optimizer.ema"
                )
            try:
                applies_to(ParamRole(matrix=True, block=True))
            except Exception as error:
                raise ConfigError(
                    f"optimizer {self.name!r}: states[{state!r}] fails for a ParamRole, {type(error).__name__}: "
                    f"{error}; give a function of one, as jaxdist.config.ALL"
                ) from None


MOMENTS: dict[str, AppliesTo] = {"exp_avg": ALL, "exp_avg_sq": ALL}
OPTIMIZERS: Registry[UpdateRule] = Registry("optimizer", UpdateRule)


def register_optimizer(row: UpdateRule) -> None:
    """Make an optimizer known to jaxdist. Raises ConfigError for a name that is taken."""
    OPTIMIZERS.register(row, registrant())


def state_kinds() -> tuple[str, ...]:
    """Kinds of state of all optimizers, the average of weights among them."""
    return (*dict.fromkeys(kind for row in OPTIMIZERS.values() for kind in row.states), EMA)


def means_of_squares() -> tuple[str, ...]:
    """Kinds of state that are never below zero."""
    return tuple(dict.fromkeys(kind for row in OPTIMIZERS.values() for kind in row.squares))


class Optimizer(Section):
    """Torch's formulas: decay on tensors of two or more dimensions only, clip by the global norm."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = "adamw"
    """adamw, adam, sgd, adafactor and muon are those of torch.optim; lion is arXiv:2302.06675. Weight decay is added to
    the gradient (L2) in adam and sgd, and decoupled in the others. muon updates the matrices of blocks, and adamw
    everything else (embedding and output head too)."""
    learning_rate: Positive = 5e-3
    """Peak learning rate."""
    warmup: CountOrZero = 20
    """Steps of linear warm-up: step s uses learning_rate · s / warmup."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning-rate decay after warm-up."""
    decay_steps: CountOrZero = 0
    """Step at which the decay ends; 0: train.steps."""
    final: Share = 0.1
    """Learning rate at the end of the decay, as a fraction of the peak."""
    beta1: Fraction = 0.9
    """Decay rate of Adam's first moment, or of lion's average within an update."""
    beta2: Fraction = 0.95
    """Decay rate of Adam's second moment, or of lion's average from step to step."""
    eps: Positive = 1e-8
    """Term added to the square root of Adam's second moment."""
    momentum: Fraction = 0.9
    """Decay rate of the momentum of sgd and muon; 0: no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum in sgd and muon."""
    ns_steps: Annotated[Count, Field(lt=100)] = 5
    """Newton-Schulz iterations with which muon orthogonalizes a matrix."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor on muon's learning rate, for I inputs and O outputs. original: sqrt(max(1, O/I)); match_rms_adamw:
    0.2·sqrt(max(I, O)), with which adamw's learning rate suits muon (arXiv:2502.16982)."""
    beta2_decay: Annotated[float, NUMBER, Field(le=0, allow_inf_nan=False)] = -0.8
    """Exponent of adafactor's second-moment decay rate: 1 - t^beta2_decay at update t."""
    d: Annotated[float, NUMBER, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Clip threshold on the root mean square of adafactor's update, before it is scaled."""
    eps1: NotNegative = 0.0
    """Lower bound on adafactor's second moments, squared as in torch; 0: the machine epsilon of their dtype."""
    eps2: NotNegative = 1e-3
    """Lower bound on the root mean square of a parameter that scales adafactor's update."""
    ema: Fraction = 0.0
    """Decay rate of an exponential moving average of the weights (torch's AveragedModel); 0: no average."""
    weight_decay: NotNegative = 0.1
    """Weight decay of tensors with two or more dimensions."""
    clip: NotNegative = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0: no clipping."""

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "Optimizer":
        if self.nesterov and not self.momentum:
            raise ValueError(
                "optimizer.nesterov = true with optimizer.momentum = 0.0; give a momentum, as optimizer.momentum = 0.9"
            )
        return self

    @property
    def states(self) -> dict[str, AppliesTo]:
        """State, under torch's names, and the parameters that have it."""
        row = OPTIMIZERS[self.name]
        with running(OPTIMIZERS, self.name, "stateless"):
            stateless = row.stateless(self)
        return ({} if stateless else {**row.states}) | ({EMA: ALL} if self.ema else {})

    @property
    def kept(self) -> tuple[str, ...]:
        """Kinds of state, under torch's names, of some or all parameters."""
        return tuple(self.states)

    @property
    def depends_on_role(self) -> bool:
        """Whether the rule treats parameters by their role, and so needs full matrices; else it is elementwise."""
        return any(applies_to is not ALL for applies_to in OPTIMIZERS[self.name].states.values())

    @property
    def elementwise(self) -> bool:
        """Whether each number of a parameter is updated by its own gradient and state alone."""
        declared = OPTIMIZERS[self.name].elementwise
        return not self.depends_on_role if declared is None else declared

    @property
    def has_eps(self) -> bool:
        """Whether the rule divides by the root of a second moment, to which `eps` is added."""
        return "exp_avg_sq" in OPTIMIZERS[self.name].states

    def landmarks(self, steps: int) -> list[int]:
        """Steps of a run of `steps` whose learning rates identify the schedule."""
        end = self.decay_steps or steps
        landmarks = {1, self.warmup, self.warmup + 1, end // 4, end // 2, 3 * end // 4, end}
        return sorted(step for step in landmarks if step >= 1)


for _row in (
    UpdateRule("adamw", MOMENTS, "jaxdist.training.optim:adam", squares=("exp_avg_sq",)),
    UpdateRule("adam", MOMENTS, "jaxdist.training.optim:adam", coupled=True, squares=("exp_avg_sq",)),
    UpdateRule(
        "sgd", {"momentum_buffer": ALL}, "jaxdist.training.optim:sgd", coupled=True, stateless=lambda o: not o.momentum
    ),
    UpdateRule("lion", {"exp_avg": ALL}, "jaxdist.training.optim:lion"),
    UpdateRule(
        "adafactor",
        {ROWS: MATRICES, COLUMNS: MATRICES, "variance": VECTORS},
        "jaxdist.training.optim:adafactor",
        squares=(ROWS, COLUMNS, "variance"),
        traffic="jaxdist.accounting.traffic:adafactor_traffic",
    ),
    UpdateRule(
        "muon",
        {"momentum_buffer": INNER, "exp_avg": OUTER, "exp_avg_sq": OUTER},
        "jaxdist.training.optim:muon",
        squares=("exp_avg_sq",),
        traffic="jaxdist.accounting.traffic:muon_traffic",
        matrices_alone=True,
    ),
):
    OPTIMIZERS.register(_row, BUILT_IN)
