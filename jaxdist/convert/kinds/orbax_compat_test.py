"""The private names of Orbax that the code uses exist. `parity_tests/private_names_test.py` checks that only `compat`
modules use them."""

import orbax.checkpoint as ocp

from jaxdist.convert.kinds.orbax_compat import WithoutMetadataStore


def test_handlers_of_arrays_have_a_metadata_store() -> None:
    missing = "ArrayHandler._array_metadata_store is gone; find its successor in jaxdist/convert/kinds/orbax_compat.py"
    (name,) = [name for name in vars(WithoutMetadataStore) if name.startswith("_array")]
    assert hasattr(ocp.type_handlers.ArrayHandler(array_metadata_store=None), name), missing
