"""Following the fixes in the benchmark's messages literally leads to a report. No test here is timed."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxdist.bench import __main__ as command
from jaxdist.bench import decoders, figures, readme, runs
from jaxdist.bench.bench_test import quick, result
from jaxdist.config import ConfigError
from jaxdist.config.fixes_test import advice

__all__ = ["quick", "result"]  # fixtures

EARLIER = "give the bench.json of an earlier --output"
GPU = ["--only", "gpu", "--device", "gpu"]
# command line -> the fix in its message -> command lines that follow it
FOLLOWED: list[tuple[Sequence[str], str, Sequence[Sequence[str]]]] = [
    (["--results", "nowhere.json"], EARLIER, [["--results", "earlier/bench.json"]]),
    (["--results", "text.json"], EARLIER, [["--results", "earlier/bench.json"]]),
    (["--only", "pace", "--compare", "empty.json"], EARLIER, [["--only", "pace", "--compare", "earlier/bench.json"]]),
    (
        ["--results", "earlier/bench.json", "--only", "pace"],
        "give either",
        [["--results", "earlier/bench.json"], ["--only", "pace"]],
    ),
    (
        ["--only", "pace", "--output", "earlier"],
        "give another folder",
        [["--only", "pace", "--output", "new"]],
    ),
    (["--only", "pace", "--output", "text.json"], "give a folder", [["--only", "pace", "--output", "new"]]),
    (
        ["--only", "pace", "--readme", "nowhere.md"],
        "give a file that can be read",
        [["--only", "pace", "--readme", "README.md"]],
    ),
    (
        ["--only", "pace", "--readme", "bytes.md"],
        "give a file that can be read",
        [["--only", "pace", "--readme", "README.md"]],
    ),
    (["--only", "gpu", "--readme", "README.md"], "leave --readme out", [["--only", "gpu"]]),
    (
        GPU,
        "use --device cpu, or leave the section gpu out by --only",
        [[*GPU[:2], "--device", "cpu"], ["--only", "pace", *GPU[2:]]],
    ),
]
WRITTEN = "write them there once"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, result: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that the command lines name; one of two sections measures planted figures, the other none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(decoders, "here", lambda: None)
    (tmp_path / "earlier").mkdir()
    sections = json.loads(result.read_text())
    for section in sections.values():
        section["stamp"]["machine"]["cores"] += 1
    (tmp_path / "earlier" / "bench.json").write_text(json.dumps(sections))
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "text.json").write_text("no JSON")
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe")
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}\nearlier\n{readme.END}\n")


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "fix", "rights"), FOLLOWED, ids=lambda value: "")
def test_each_fix_is_followed(wrong: Sequence[str], fix: str, rights: Sequence[Sequence[str]]) -> None:
    with pytest.raises(ConfigError) as error:
        command.main(wrong)
    assert str(error.value).endswith(f"; {fix}")
    for right in rights:
        command.main(right)
        shutil.rmtree("new", ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("text", ["", f"{readme.END}\n{readme.BEGIN}\n"])
def test_lines_are_written_where_a_readme_has_none(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "plain.md").write_text(text)
    line = ["--only", "pace", "--readme", "plain.md"]
    with pytest.raises(ConfigError) as error:
        command.main(line)
    assert str(error.value).endswith(f"; {WRITTEN}")
    file.write_text("\n".join(re.findall("'(<!--.*?-->)'", str(error.value))))
    command.main(line)
    assert "x over y" in file.read_text()


def test_every_fix_is_followed() -> None:
    """Each fix in the source is among those that the tests above follow."""
    known = {fix for _, fix, _ in FOLLOWED} | {WRITTEN}
    modules = [Path(module.__file__ or "") for module in (command, figures, readme, runs)]
    assert not [p for p in advice(*modules) if not any(re.fullmatch(p, fix) for fix in known)]
