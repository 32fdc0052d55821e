"""Functions of the computing core have at most five parameters, and objects of more fields are made by keywords.

Ruff (PLR0913) counts parameters everywhere but `*rest` and `**more`; this counts these too, and arguments of calls.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from parity_tests.imports_test import ROOT, source_files

MOST = 5
CORE = [
    file
    for package in ("jaxdist", "torch_ref")
    for room in ("config", "parallel", "families", "training", "accounting")
    for file in source_files(f"{package}/{room}")
] + [ROOT / package / "train.py" for package in ("jaxdist", "torch_ref")]

# (file, function) -> why it has more.
EXCEPTIONS = {
    ("jaxdist/training/optim.py", "update"): "optax's GradientTransformationExtraArgs: any extra argument by keyword",
}


def long_signatures(file: Path) -> Iterator[str]:
    """Functions of more than MOST parameters, `self` aside, and calls of classes with more positional arguments."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            a = node.args
            variadic = [arg for arg in (a.vararg, a.kwarg) if arg]
            names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *variadic)]
            if len(names) - (names[:1] in (["self"], ["cls"])) > MOST:
                yield getattr(node, "name", "lambda")
        elif isinstance(node, ast.Call) and len(node.args) > MOST:
            name = ast.unparse(node.func).rpartition(".")[2]
            if name[:1].isupper():
                yield f"{name}(...)"


def test_functions_of_the_core_have_at_most_five_parameters() -> None:
    found = {(str(file.relative_to(ROOT)), name) for file in CORE for name in long_signatures(file)}
    assert found == EXCEPTIONS.keys()


def test_long_signatures_are_found(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "class A:\n    def f(self, a, b, c, d, e): ...\n    def g(self, a, b, c, *d, e, **f): ...\n"
        "def h(a, b, c=0, *, d=0, e=0, f=0): ...\nx = m.A(1, 2, 3, 4, 5, 6), A(1, 2, 3, 4, 5), f(1, 2, 3, 4, 5, 6)\n"
        "y = lambda a, b, c, d, e, f: 0\n"
    )
    assert sorted(long_signatures(file)) == ["A(...)", "g", "h", "lambda"]
