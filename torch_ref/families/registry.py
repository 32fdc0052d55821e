"""The families that torch_ref has, and how others are registered. Imports no torch.

Twin: jaxdist/config/registry.py.
"""

from dataclasses import dataclass

from jaxdist.config.registry import Reference, Registry, owner


@dataclass(frozen=True)
class Family:
    """A family of models as torch_ref knows it. `jaxdist.Family` is the row of its twin."""

    name: str
    """Value of `model.family`."""
    model: Reference
    """The class of its module, which is built from a config: "package.module:name", or the class."""
    accounting: Reference | None = None
    """Closed forms of its FLOPs and memory; None: unknown."""


FAMILIES: Registry[Family] = Registry("family of torch_ref", "torch_ref.families.rows")


def register_family(row: Family) -> None:
    """Make a family known to torch_ref. Raises ConfigError for a name that is taken."""
    module = row.model.partition(":")[0] if isinstance(row.model, str) else row.model.__module__
    FAMILIES.register(row.name, row, owner(module))
