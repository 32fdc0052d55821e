"""Each `pip install` in a message names an extra that exists and brings the missing package."""

import re
import subprocess
import tomllib

import pytest

from parity_tests.imports_test import FLOORS, ROOT, source_files

ADVICE = re.compile(r"pip install '?([\w-]+)(?:\[([\w,]+)\])?")
OTHERS = {"transformers"}  # advised by its own name; an extra for tests has it


def advised() -> list[tuple[str, str, str]]:
    """(file, package, extra) of each `pip install` in messages and pages."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    files = [file for package in FLOORS for file in source_files(package)] + [page for page in pages if page.is_file()]
    return [
        (str(file.relative_to(ROOT)), package, extra)
        for file in files
        for package, extras in ADVICE.findall(file.read_text(encoding="utf-8"))
        for extra in (extras.split(",") if extras else [""])
    ]


def extras() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return found


def test_each_extra_that_is_advised_exists() -> None:
    found = advised()
    assert len({extra for file, _, extra in found if file.endswith(".py") and extra}) >= 5
    for file, package, extra in found:
        assert not extra or (package == "jaxdist" and extra in extras()), f"{file}: {package}[{extra}]"


# Optional module -> the extra that its message advises.
MODULES = {
    "jaxdist/formats/kinds.py": ("torch", ["torch"]),
    "jaxdist/plan.py": ("report", ["matplotlib", "jinja2"]),
    "jaxdist/data/images.py": ("images", ["scikit-learn", "pillow"]),
    "jaxdist/data/unpacking.py": ("data", ["pyarrow", "zstandard"]),
    "jaxdist/runs/folder.py": ("tensorboard", ["tensorboardx"]),
    "jaxdist/bench/pace.py": ("torch", ["torch"]),
}


@pytest.mark.parametrize("file", MODULES)
def test_an_extra_brings_the_missing_package(file: str) -> None:
    extra, packages = MODULES[file]
    assert {found for name, _, found in advised() if name == file} == {extra}
    brought = {re.split(r"[\[><=]", requirement)[0].lower() for requirement in extras()[extra]}
    assert brought >= {*packages}


def test_every_advice_to_install_is_tested() -> None:
    own = {file for file, package, _ in advised() if file.endswith(".py") and package == "jaxdist"}
    assert own == {*MODULES, "parity_tests/__main__.py"}  # this one advises two at once
    assert {package for file, package, _ in advised() if file.endswith(".py")} <= {"jaxdist", *OTHERS}


@pytest.mark.long
def test_the_command_that_fetches_a_pointer_is_one_of_git_lfs() -> None:
    from jaxdist.config.bounded import FETCH

    *_, command = FETCH.partition("fetch it by ")
    assert command == "git lfs pull"
    if subprocess.run(["git", "lfs", "version"], capture_output=True, check=False).returncode == 0:
        assert subprocess.run([*command.split(), "--help"], capture_output=True, check=False).returncode == 0
