"""Each private name of JAX that the code relies on is there, and private names are in one module alone."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPAT = "jaxdist/runtime/compat.py"
NAMES = {
    "jax._src.clusters": "ClusterEnv.auto_detect_unset_distributed_params",
    "jax._src.compilation_cache": "get_file_cache",
    "jax._src.compilation_cache_interface": "CacheInterface",
    "jax._src.distributed": "global_state.client",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_private_name_is_there(module: str) -> None:
    found = import_module(module)
    for name in NAMES[module].split("."):
        assert hasattr(found, name), f"{module}: {NAMES[module]} is gone; find its successor in {COMPAT}"
        found = getattr(found, name)


def test_private_names_of_jax_are_in_one_module() -> None:
    files = [file for folder in ("jaxdist", "parity_tests") for file in (ROOT / folder).rglob("*.py")]
    others = [file for file in files if not file.name.endswith("_test.py")]
    private = re.compile(r"\b(?:jax|flax|optax)\._src\b|^ *(?:from|import) jaxlib\b", re.MULTILINE)
    found = {str(file.relative_to(ROOT)) for file in others if private.search(file.read_text(encoding="utf-8"))}
    assert found == {COMPAT}
