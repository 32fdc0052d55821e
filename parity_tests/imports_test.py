"""Who may import whom: what both sides read is neutral, and nothing that computes is shared."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def sources(folder: str) -> list[Path]:
    return [
        p for p in sorted((ROOT / folder).rglob("*.py")) if not p.name.endswith("_test.py") and p.name != "conftest.py"
    ]


def called(path: Path) -> set[str]:
    """The names of what a file calls."""
    functions = [
        node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    ]
    return {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


NEUTRAL = ("jaxdist.config", "jaxdist.data", "jaxdist.formats")  # what both sides read
ON_CONFIG = {
    "jaxdist/config": NEUTRAL[:2],
    "jaxdist/data": NEUTRAL[:2],
    "jaxdist/formats": ("jaxdist.config", NEUTRAL[2]),
}


@pytest.mark.parametrize("folder", ON_CONFIG)
def test_what_both_read_is_neutral(folder: str) -> None:
    for path in sources(folder):
        assert not tops(path) & (JAX | {"torch", "torch_ref", "parity_tests"}), path
        inside = {name for name in imports(path) if name.startswith("jaxdist.")}
        assert all(name.startswith(ON_CONFIG[folder]) for name in inside), path


def test_torch_ref_never_imports_jax() -> None:
    for path in sources("torch_ref"):
        assert not tops(path) & (JAX | {"parity_tests"}), path
        inside = {name for name in imports(path) if name.startswith("jaxdist.")} - {"jaxdist.__version__"}
        assert all(name.startswith(NEUTRAL) for name in inside), path


# In convert/: what reads and writes torch's own files.
TORCH_FILES = {
    *("torch_files.py", "torch_leaves.py", "torch_own.py", "torch_parts.py", "torch_records.py", "torch_zip.py"),
    *("torch_numpy.py", "boxes.py", "dcp_files.py", "optimizers.py", "assembled.py", "deepspeed_folders.py"),
}
WITNESS = "witness.py"  # there too: another implementation's logits, for --verify


def test_jaxdist_never_imports_torch() -> None:
    for path in sources("jaxdist"):
        within = path.parent.name == "convert"
        torch = set() if within and path.name in {*TORCH_FILES, WITNESS} else {"torch"}
        transformers = set() if within and path.name == WITNESS else {"transformers"}
        assert not tops(path) & (torch | transformers | {"torch_ref", "parity_tests"}), path


def test_comparison_needs_neither() -> None:
    """Of numpy alone, and its dtypes of fewer bits."""
    assert tops(ROOT / "parity_tests/compare.py") <= {"collections", "typing", "numpy", "ml_dtypes"}


@pytest.mark.parametrize("name", ["atoms", "mapping", "suggest", "transforms"])
def test_key_mappings_need_neither(name: str) -> None:
    assert not tops(ROOT / f"jaxdist/convert/{name}.py") & (JAX | {"torch"})


def test_order_within_jaxdist() -> None:
    """config <- mesh <- sharding <- step <- train: nothing imports what comes after it; models never see a mesh."""
    order = ["mesh", "sharding", "step", "program", "train"]
    for i, name in enumerate(order):
        later = {f"jaxdist.{other}" for other in order[i + 1 :]}
        assert not imports(ROOT / f"jaxdist/{name}.py") & later, name
    for path in sources("jaxdist/models"):
        assert not imports(path) & {"jaxdist.mesh", "jaxdist.program", "jaxdist.step", "jax.sharding.Mesh"}, path


PLANNING = ("plan.py", "planner", "bench")  # commands and packages that may ask the planner


def test_training_asks_no_planner() -> None:
    """A family without closed forms trains all the same."""
    for path in sources("jaxdist"):
        if path.relative_to(ROOT / "jaxdist").parts[0] not in PLANNING:
            assert not any(name.startswith("jaxdist.planner") for name in imports(path)), path
    assert "jaxdist.planner.plans" in imports(ROOT / "jaxdist/plan.py")


# What of jax.lax names a mesh axis, and sends or asks where a device is.
OVER_AXES = {
    *("psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute"),
    *("axis_index", "axis_size", "pcast", "pvary"),
}


def test_models_speak_to_the_mesh_by_verbs_alone(tmp_path: Path) -> None:
    for path in sources("jaxdist/models"):
        assert not called(path) & OVER_AXES, path
    assert called(ROOT / "jaxdist/collectives.py") >= {"psum", "pmax", "axis_index"}  # which says what each sends
    file = tmp_path / "x.py"
    file.write_text("def f(x):\n    return jax.tree.map(lambda a: lax.psum(a, 'tensor'), x) + pmax(x, 'tensor')\n")
    assert called(file) & OVER_AXES == {"psum", "pmax"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [("jaxdist", JAX | {"torch"}), ("jaxdist.config", JAX | {"torch"}), ("jaxdist.data", JAX | {"torch"}),
     ("jaxdist.formats.plan", JAX | {"torch"}),
     ("jaxdist.train", {"torch", "orbax", "jaxdist.convert"}),
     ("jaxdist.convert.__main__", {"torch"}), ("jaxdist.bench.__main__", JAX | {"torch"}),
     ("torch_ref.train", JAX), ("torch_ref.reader, tensorstore, jaxdist.formats.sources", JAX),
     ("parity_tests.transformers_train", JAX)],
)  # fmt: skip
def test_at_run_time(module: str, forbidden: set[str]) -> None:
    """The same, of what is really loaded; and training waits for nothing that its first step can do without."""
    if not module.startswith("jaxdist"):
        pytest.importorskip("torch")
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {forbidden!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_check_sees_a_forbidden_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("def f():\n    from jax.numpy import array\n    import torch.nn\n")
    assert tops(file) >= {"jax", "torch"}
