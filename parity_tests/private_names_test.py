"""Private names of other packages occur in `compat` modules alone, where tests report by name one that a release
drops."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from parity_tests.imports_test import ROOT, source_files

COMPAT = {
    "jaxdist/runtime/compat.py",
    *("jaxdist/convert/kinds/orbax_compat.py", "jaxdist/convert/kinds/torch_compat.py"),
    "torch_ref/runtime/compat.py",
}
OURS = {"jaxdist", "torch_ref", "parity_tests"}
# Private names of named tuples, os and sys.
PUBLIC = {"_asdict", "_fields", "_field_defaults", "_make", "_replace", "_exit", "_getframe"}
# Private names of packages other than JAX and torch, by module.
OTHERS = {
    # fields of transformers' configs
    "jaxdist/convert/hf_reference.py": {"_attn_implementation", "_experts_implementation"},
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, variables, and attributes set on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def origins(tree: ast.AST) -> dict[str, str]:
    """Names that a module imports -> the package that each is from."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name).partition(".")[0]: a.name.partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {a.asname or a.name: node.module.partition(".")[0] for a in node.names}
    return found


def overridden(tree: ast.AST) -> Iterator[str]:
    """Private names that classes assign in their bodies and whose meaning a base of another package may give them."""
    imported = origins(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {
                imported.get(name.id) for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)
            }
            if bases - {None, *OURS}:
                yield from {*defined(ast.Module(assignments(node), []))}


def assignments(node: ast.ClassDef) -> list[ast.stmt]:
    return [statement for statement in node.body if isinstance(statement, ast.Assign | ast.AnnAssign)]


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(file: Path) -> set[str]:
    """Private names of other packages that a module imports, reads from a value or overrides."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    own, found = Counter(defined(tree)), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            imported = []
        for name in imported:
            first, *parts = name.split(".")
            if first == "jaxlib" or (first not in OURS and any(map(is_private, parts))):
                found.add(name)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            definitions = 2 if ast.unparse(node.value) == "super()" else 1  # one of the definitions overrides the name
            if own[node.attr] < definitions and node.attr not in PUBLIC:
                found.add(node.attr)
    return found | {name for name in overridden(tree) if is_private(name)}


def test_private_names_of_others_are_in_compat() -> None:
    """Planted mistakes are exempt: they replace private functions."""
    for package in sorted(OURS):
        for file in source_files(package):
            name = str(file.relative_to(ROOT))
            if "mistakes" not in file.parts and name not in COMPAT:
                assert private_names(file) == OTHERS.get(name, set()), name


def test_private_names_are_found(tmp_path: Path) -> None:
    assert private_names(ROOT / "torch_ref/runtime/compat.py") >= {"_flatten", "_get_default_store", "_apply"}
    file = tmp_path / "module.py"
    file.write_text(
        """
import jax._src.core
from jaxlib import xla_client
from torch._C import x
from torch import _y
from orbax import mesh

class A(B):
    def _own(self):
        return self._own(), row._replace(), os._exit(1), super()._inherited(), other._own

class Handler(mesh.Handler, Row):
    _setting: int = 1
    public = 2

class Our(A):
    _setting_of_ours = 1

print(torch._C.z, mesh._flatten, jax.__version__)
"""
    )
    imported = {"jax._src.core", "jaxlib.xla_client", "torch._C.x", "torch._y"}
    assert private_names(file) == {*imported, "_inherited", "_C", "_flatten", "_setting"}
