"""The benchmark's command: measurements, files, output and refusals. No test here is timed."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from jaxdist.bench import __main__ as command
from jaxdist.bench import effort, facts, pace, readme, runs, start
from jaxdist.bench.effort import QUICK, Bench
from jaxdist.bench.figures import Figure, Goal, Section, read
from jaxdist.bench.stamp import Others, Stamp, machine
from jaxdist.config import ConfigError, TrainingError

pytestmark = pytest.mark.long

Capsys = pytest.CaptureFixture[str]
TINY = [
    "--data.sequence", "8", "--train.batch", "2", "--model.layers", "1", "--model.dim", "16", "--model.heads", "2",
    "--model.kv_heads", "1", "--model.head_dim", "4", "--model.hidden", "16", "--device", "cpu",
]  # fmt: skip
EARLIER = Stamp(machine("cpu"), date="2026-01-02T03:04:05+00:00", load=0.1, commit="abc")


def planted(bench: Bench) -> Iterator[Figure]:
    bench.say("one")
    yield Figure("x over y", (0.8, 0.9), goal=Goal("at least", 1.0), beside={"x, ms": 4.0})
    bench.notes.append("a row is left out")


def every(section: str) -> tuple[Figure, ...]:
    """Figures as in a section."""
    if section == "start":
        ratio = Figure("cold start over warm start", (3.0, 4.0), goal=Goal("at least", 3.0))
        stages = [Figure(f"{kind}: {stage}", (1.0,), "s") for stage in start.STAGES for kind in ("cold", "warm")]
        return ratio, *stages
    if section == "facts":
        return tuple(facts.figures("ddp", facts.Ratios(1.0, 1.2, 5e6)))
    return tuple(planted(Bench("cpu", QUICK, Path(), lambda _: None)))


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """A bench.json with all sections."""
    (file := tmp_path / "bench.json").write_text(
        json.dumps(
            command.figures.to_json({name: Section(every(name), EARLIER, ("a note",)) for name in command.SECTIONS})
        )
    )
    return file


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.SECTIONS, "pace", ("Pace", planted))
    monkeypatch.setattr(command.Others, "share", 0.0)  # whatever else the machine runs


@pytest.mark.usefixtures("quick")
def test_one_object_and_a_folder(tmp_path: Path, capsys: Capsys, result: Path) -> None:
    output = tmp_path / "out"
    command.main(["--only", "pace", "--json", "--output", str(output), "--compare", str(result)])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["sections"] == json.loads((output / "bench.json").read_text())
    pace = found["sections"]["pace"]
    assert pace["notes"] == ["a row is left out"] and pace["figures"][0]["met"] is False
    assert pace["stamp"]["machine"]["cores"] and "load" in pace["stamp"] and "commit" in pace["stamp"]
    assert found["compared"][0]["differs"] is False and found["compared"][0]["ratio"] == 1
    assert "one ..." in printed.err and "x over y" in printed.err and "0 of 1 figures differ" in printed.err


@pytest.mark.usefixtures("quick")
def test_earlier_sections_are_kept(result: Path) -> None:
    """Sections from another machine are refused."""
    command.main(["--only", "pace", "--device", "cpu", "--output", str(result.parent)])
    found = read(result, "--results")
    assert found.keys() == command.SECTIONS.keys() and found["start"].stamp == EARLIER != found["pace"].stamp
    with pytest.raises(ConfigError, match=r"has the section facts of another machine or other versions"):
        command.main(["--only", "pace", "--device", "auto", "--output", str(result.parent)])


def test_a_page_is_drawn(result: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command.main(["--results", str(result), "--output", str(tmp_path / "out"), "--compare", str(result)])
    page = (tmp_path / "out" / "bench.html").read_text()
    assert page.count("<svg") == len(command.SECTIONS) + 1  # plus the stages
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org/", "")
    for text in (*(title for title, _ in command.SECTIONS.values()), "missed", "a note", "commit abc", "now / then"):
        assert text in page, text


def test_the_readme_is_written_between_its_comments(result: Path, tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"# Before\n\n{readme.BEGIN}\nearlier\n{readme.END}\n\nafter\n")
    for _ in range(2):
        command.main(["--results", str(result), "--readme", str(file)])
    text = file.read_text()
    assert text.startswith("# Before\n") and text.endswith("\nafter\n") and "earlier" not in text
    assert "| ddp | 1.000 | 1.200 **missed** |" in text and "| trace | 1 | 1 |" in text
    assert text.count("| x over y | 0.85 (0.8 to 0.9) | ≥ 1 **missed** | x, ms 4 |") == 5
    assert "2026-01-02, commit abc." in text
    assert "Goals that are missed: x over y, 0.85 (≥ 1); x over y, 0.85 (≥ 1); memory, ddp, 1.2 (≤ 1.1); x" in text


@pytest.mark.parametrize(
    "text", ["no comments", f"{readme.END}\n{readme.BEGIN}", 2 * f"{readme.BEGIN}\n{readme.END}\n"]
)
def test_a_readme_without_a_place_is_refused(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "README.md").write_text(text)
    with pytest.raises(ConfigError, match="the tables go between the lines"):
        command.main(["--readme", str(file)])


def test_an_incomplete_result_is_shown_as_far_as_it_goes(result: Path, tmp_path: Path) -> None:
    """Handwritten or from an earlier version: rows and stages without a figure are left out."""
    sections = json.loads(result.read_text())
    for name, kept in ("facts", "memory"), ("start", "cold"):
        figures = sections[name]["figures"]
        sections[name]["figures"] = [figure for figure in figures if figure["name"].startswith(kept)]
    result.write_text(json.dumps(sections))
    (file := tmp_path / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    command.main(["--results", str(result), "--readme", str(file), "--output", str(tmp_path / "out")])
    assert "| cold start over warm start | 3.5" in file.read_text() and "| trace |" not in file.read_text()


@pytest.mark.parametrize("names", [(), ("of an older benchmark",)])
def test_a_result_without_sections_is_refused(names: Sequence[str], result: Path, tmp_path: Path) -> None:
    """The README keeps its content."""
    pace = json.loads(result.read_text())["pace"]
    (empty := tmp_path / "empty.json").write_text(json.dumps(dict.fromkeys(names, pace)))
    (file := tmp_path / "README.md").write_text(f"{readme.BEGIN}\nearlier\n{readme.END}\n")
    for option in "--results", "--compare":
        with pytest.raises(ConfigError, match=rf"{option} .*empty.json: has none of the sections facts, .*; give the"):
            command.main([option, str(empty), "--readme", str(file)])
    assert "earlier" in file.read_text()


def test_the_projects_own_readme_has_a_place() -> None:
    readme.check(Path(__file__).resolve().parents[2] / "README.md")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--only", "paces"], r"--only.*paces"),
        (["--onyl", "pace"], r"unknown argument '--onyl'; did you mean '--only'"),
        (["--device", "tpu"], r"--device.*tpu"),
        (["--quick", "--full"], r"not allowed with"),
        (["--results", "bench.json", "--quick"], r"--results measures nothing"),
        (["--results", "nowhere.json"], r"--results nowhere.json: No such file"),
        (["--compare", "nowhere.json"], r"--compare nowhere.json: No such file"),
        (["--readme", "nowhere.md"], r"--readme nowhere.md: .*give a file"),
        (["--output", __file__], r"is a file; give a folder"),
        (["--only", "gpu", "--device", "gpu"], r"--device gpu: nvidia-smi names no GPU of .*; use --device cpu, or"),
    ],
)
def test_bad_input(line: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main(line)


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The side that starts alternates from pair to pair; a ratio is within a pair."""
    lines: list[str] = []

    class Ran:
        def __init__(self, step: float) -> None:
            self.step = step

    def train(side: str, line: Sequence[str], output: Path, *_: Any) -> Ran:
        lines.append(side)
        return Ran({"jaxdist": 1.0, "torch_ref": 2.0}[side] * len(lines))

    monkeypatch.setattr(pace, "train", train)
    (figure,) = pace.compare(Bench("cpu", QUICK, tmp_path, lambda _: None), pace.SMALL, pace.EIGHT[0], 2)
    assert lines == ["jaxdist", "torch_ref", "torch_ref", "jaxdist"]
    assert figure.values == (4.0, 1.5) and figure.name == "256 × 4, 8 devices, ddp, against torch"


def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(effort, "find_spec", lambda name: None)
    bench = Bench("cpu", QUICK, tmp_path, lambda _: None)
    assert not list(pace.measure(bench)) and "torch is not installed" in bench.notes[0]


def test_the_load_of_other_processes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share of all cores; None where the system does not tell."""
    share = Others().share
    assert share is None or 0 <= share <= 1
    for seconds, share in ([(5.0, 7.0), (15.0, 12.0)], 0.25), ([None, None], None):
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        monkeypatch.setattr(Others, "_seconds", staticmethod(iter(seconds).__next__))
        assert Others().share == share


def test_a_run_reports_its_steps_and_stages(tmp_path: Path) -> None:
    """Its compiled programs are cached beside its folder."""
    found = runs.train("jaxdist", ["--steps", str(runs.WARM_UP + 2), *TINY], tmp_path / "run")
    assert len(found.seconds) == 2 and found.step > 0
    assert tuple(found.summary["start_seconds"]) == start.STAGES
    assert found.summary["start_seconds"]["imports"] > 0
    assert (tmp_path / "cache" / "jaxdist" / "compiled").is_dir()


def test_a_separate_process_has_its_own_devices_and_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set before JAX is imported there; JAX's own cache variables, which would win, are unset."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "another")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with runs.apart(XDG_CACHE_HOME="mine", JAX_NUM_CPU_DEVICES="3") as call:
        assert [call(os.getenv, name) for name in ("XDG_CACHE_HOME", "JAX_PLATFORMS")] == ["mine", "cpu"]
        assert call(eval, "__import__('jax').device_count()") == 3
        assert call(eval, "__import__('jax').config.jax_compilation_cache_dir") is None


@pytest.mark.usefixtures("quick")
def test_a_readme_keeps_its_tables_where_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(command.SECTIONS, "pace", ("Pace", lambda bench: bench.notes.append("left out") or iter(())))
    (file := tmp_path / "README.md").write_text(text := f"{readme.BEGIN}\nearlier\n{readme.END}\n")
    with pytest.raises(ConfigError, match="nothing was measured"):
        command.main(["--only", "pace", "--readme", str(file)])
    assert file.read_text() == text


@pytest.mark.parametrize(("code", "kind"), [(1, TrainingError), (2, ConfigError), (-9, TrainingError)])
def test_a_run_that_fails_says_why(
    code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = CompletedProcess([], code, "", "error: step 3: planted")
    monkeypatch.setattr(runs.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(kind, match=rf"jaxdist.train .* ended with {code}: step 3: planted"):
        runs.train("jaxdist", [], tmp_path / "run")
