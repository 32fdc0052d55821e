"""The families that torch_ref has, and how others are registered. Imports no torch.

Twin: jaxdist/config/registry.py.
"""

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from jaxdist.config.errors import ConfigError
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
STYLES = ("embedding", "positions", "norm", "enter", "column", "heads", "row", "last_norm", "head")


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
    """Additions and changes to TENSOR_PLAN for its tensor parallelism; "" replicates a module, and all within it."""
    no_pipeline: str = ""
    """Why torch's pipeline stages can't train it; empty: they can."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a style that there is not."""
        if not isinstance(self.tensor, Mapping):
            raise ConfigError(
                f"family {self.name!r} of torch_ref: tensor = {reprlib.repr(self.tensor)}; give a mapping of names of "
                "modules to styles, as {'layers.*.mix.in_proj': 'column'}"
            )
        if unknown := [(module, style) for module, style in self.tensor.items() if style not in ("", *STYLES)]:
            module, style = unknown[0]
            raise ConfigError(
                f"family {self.name!r} of torch_ref: tensor[{module!r}] = {style!r} is no style; choose one of "
                f"{', '.join(STYLES)}, or '' to replicate the module"
            )

    @property
    def plan(self) -> dict[str, str]:
        """Pattern of module names -> style under tensor parallelism."""
        return {name: style for name, style in {**TENSOR_PLAN, **self.tensor}.items() if style}

    def unplanned(self, modules: Iterable[str]) -> list[str]:
        """Modules among these that have neither a style nor ""; each kind once, with * for numbers."""
        patterns = {**TENSOR_PLAN, **self.tensor}
        unsplit = [pattern for pattern, style in patterns.items() if not style]

        def planned(module: str) -> bool:
            parts = module.split(".")
            around = [".".join(parts[:count]) for count in range(1, len(parts))]
            return any(fnmatchcase(module, pattern) for pattern in patterns) or any(
                fnmatchcase(outer, pattern) for outer in around for pattern in unsplit
            )

        return list(dict.fromkeys(re.sub(r"\b\d+\b", "*", module) for module in modules if not planned(module)))


FAMILIES: Registry[Family] = Registry("family of torch_ref", Family, "torch_ref.families.rows")


def register_family(row: Family) -> None:
    """Make a family known to torch_ref. Raises ConfigError for a name that is taken."""
    FAMILIES.register(row, registrant())
