"""Orbax's names that are not public and have no public counterpart. Seen in orbax-checkpoint 0.12.8.

`orbax_compat_test.py` fails by name where a release drops one.
"""

import orbax.checkpoint as ocp

__all__ = ["WithoutMetadataStore"]


class WithoutMetadataStore(ocp.type_handlers.NumpyHandler):
    """A handler of arrays without metadata, as `ArrayHandler(array_metadata_store=None)`: Orbax asks each handler of a
    registry for the attribute, and warns if it differs from the others'."""

    _array_metadata_store = None
