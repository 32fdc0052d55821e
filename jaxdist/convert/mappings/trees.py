"""A pytree of arrays as dotted names, and back: linen's dictionaries, nnx states, lists, dataclasses."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxdist.config import ConfigError

SHELL, CORE = "params.", ".value"  # what linen puts around all names, and nnx after them: left out where all have it


def flatten(tree: Any) -> dict[str, Any]:
    """name -> leaf, in the order of `jax.tree.leaves`: dictionaries are sorted. Raises ConfigError for a name given
    twice."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in found:
            raise ConfigError(f"two arrays of the tree are called {name}; name one of them otherwise, without a dot")
        found[name] = leaf
    for affix, drop in ((SHELL, str.removeprefix), (CORE, str.removesuffix)):
        has = str.startswith if affix == SHELL else str.endswith
        if all(has(name, affix) for name in found):
            found = {drop(name, affix): leaf for name, leaf in found.items()}
    return found


def unflatten(tree: Any, named: Mapping[str, Any]) -> Any:
    """A tree like `tree` with the leaves of `named`, all of them."""
    return jax.tree.unflatten(jax.tree.structure(tree), [named[name] for name in flatten(tree)])


def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """name -> shape of the leaves."""
    return {name: tuple(leaf.shape) for name, leaf in flatten(tree).items()}
