"""The families that torch_ref has, and how others are registered. Imports no torch.

Twin: jaxdist/config/registry.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jaxdist.config.registry import Reference, Registry, registrant

# Modules of a decoder, where * is the number of a block -> their style under tensor parallelism, by its name in
# `training/parallelize.py`. Modules that a model lacks are passed over.
TENSOR_PLAN: Mapping[str, str] = MappingProxyType(
    {
        "embed": "embedding",
        "positions": "positions",
        "layers.*.attention_norm": "norm",
        "layers.*.attention": "enter",
        "layers.*.attention.q_proj": "column",
        "layers.*.attention.k_proj": "column",
        "layers.*.attention.v_proj": "column",
        "layers.*.attention.q_norm": "heads",
        "layers.*.attention.k_norm": "heads",
        "layers.*.attention.o_proj": "row",
        "layers.*.mlp_norm": "norm",
        "layers.*.mlp": "enter",
        "layers.*.mlp.gate_proj": "column",
        "layers.*.mlp.up_proj": "column",
        "layers.*.mlp.down_proj": "row",
        "norm": "last_norm",
        "lm_head": "head",
    }
)


@dataclass(frozen=True)
class Family:
    """A family of models as torch_ref knows it. `jaxdist.Family` is the row of its twin."""

    name: str
    """Value of `model.family`."""
    model: Reference
    """The class of its module, which is built from a config and keeps it as `config`: "package.module:name", or it."""
    accounting: Reference | None = None
    """Closed forms of its FLOPs and memory; None: unknown."""
    blocks: str = "layers.*"
    """Names of its blocks, in order; * is a number."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Additions and changes to TENSOR_PLAN for its tensor parallelism; "" leaves a module out."""
    no_pipeline: str = ""
    """Why torch's pipeline stages can't train it; empty: they can."""

    @property
    def plan(self) -> dict[str, str]:
        """Pattern of module names -> style under tensor parallelism."""
        return {name: style for name, style in {**TENSOR_PLAN, **self.tensor}.items() if style}


FAMILIES: Registry[Family] = Registry("family of torch_ref", "torch_ref.families.rows")


def register_family(row: Family) -> None:
    """Make a family known to torch_ref. Raises ConfigError for a name that is taken."""
    FAMILIES.register(row, registrant())
