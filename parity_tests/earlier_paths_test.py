"""Users' scripts find the names that moved, and no room imports more for it."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOVED = {
    "jaxdist.config": {"RunFolder": "jaxdist.runs.folder", "load": "jaxdist.command_line.arguments"},
    "jaxdist.convert.mapping": dict.fromkeys(("KeyMapping", "Row"), "jaxdist.convert.mappings.mapping"),
    "jaxdist.convert.suggest": {"suggest": "jaxdist.convert.mappings.suggest"},
    "jaxdist.convert.trees": {"shapes": "jaxdist.convert.mappings.trees"},
    "parity_tests.port": dict.fromkeys(("Port", "torch_shapes"), "parity_tests.port.port"),
    "parity_tests.transformers_train": {"Double": "parity_tests.runs.transformers_train"},
}
# The first lines of a user's training loop.
SCRIPT = """
from jaxdist.config import RunFolder, load
from jaxdist.data import IGNORED, dataset_of
from parity_tests.transformers_train import Double
from jaxdist.convert.mapping import KeyMapping, Row
from parity_tests.port import Port, torch_shapes
print(RunFolder.__name__, load(None, {}).train.steps > 0, Double.__name__)
"""


@pytest.mark.parametrize(("earlier", "name"), [(path, name) for path, names in MOVED.items() for name in names])
def test_names_are_found_where_they_were(earlier: str, name: str) -> None:
    for package in ("torch", "transformers") if earlier.startswith("parity_tests") else ():
        pytest.importorskip(package)
    assert getattr(import_module(earlier), name) is getattr(import_module(MOVED[earlier][name]), name)


@pytest.mark.parametrize(("module", "name"), [("jaxdist.config", "Folder"), ("parity_tests.port", "shapes")])
def test_other_names_are_still_missed(module: str, name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'"):
        getattr(import_module(module), name)


@pytest.mark.long
@pytest.mark.slow
def test_a_loop_of_another_begins() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["RunFolder", "True", "Double"], done.stderr
