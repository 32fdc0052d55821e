"""Content of the wheel, as listed by its build backend."""

import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_THE_REPOSITORY = ("parity_tests/suite/", "parity_tests/validation/")
MOST = 800_000  # bytes when compressed: modules, and a few other files


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """Path within the wheel -> the packed file."""
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    forced = builder.recurse_forced_files(builder.config.get_force_include())
    return {file.distribution_path: Path(file.path) for file in (*builder.recurse_included_files(), *forced)}


def test_it_holds_all_modules_and_their_data_files(files: dict[str, Path]) -> None:
    for package in ("jaxdist", "torch_ref", "parity_tests"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            tested = path.name.endswith("_test.py") or path.name == "conftest.py"
            assert (name in files) != (tested or name.startswith(OF_THE_REPOSITORY)), name
    assert {"jaxdist/configs/default.toml", "jaxdist/config/hardware.toml", "parity_tests/report/report.html.j2"} <= {
        *files
    }


def test_it_holds_nothing_else(files: dict[str, Path]) -> None:
    assert {Path(name).suffix for name in files} == {".py", ".toml", ".j2", ".yaml", ".sh"}
    assert not [name for name in files if name.startswith(OF_THE_REPOSITORY)]


def test_no_module_imports_a_module_outside_of_the_wheel(files: dict[str, Path]) -> None:
    lacking = [".".join(Path(folder).parts) for folder in OF_THE_REPOSITORY]
    for name, file in files.items():
        assert not [module for module in lacking if module in file.read_text(encoding="utf-8")], name


def test_it_is_no_larger_than_its_source(files: dict[str, Path]) -> None:
    assert sum(len(zlib.compress(file.read_bytes())) for file in files.values()) < MOST
