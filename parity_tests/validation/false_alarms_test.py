"""The job that counts false alarms: its runs, sharing, resuming and report; only one test trains, slowly."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from jaxdist.config import ConfigError, Experiment, Parallel
from parity_tests.proof.verdict import NOT_EQUIVALENT, Check, Verdict
from parity_tests.runs import cases, stamp, workers
from parity_tests.runs.run import Run
from parity_tests.runs.stamp import code
from parity_tests.runs.workers import Ranks, compiled_from, inherit
from parity_tests.validation import false_alarms
from parity_tests.validation.false_alarms import (
    MESHES,
    RESULTS,
    STEPS,
    Case,
    Group,
    Result,
    SharedProof,
    closest,
    main,
    share,
    table,
)
from torch_ref.runtime import launch

CASE = Case(0, "llama", "fsdp", "bf16")
HALF, ALL, NOTHING = (
    Check("mathematics", "loss", 1e-12, 2e-12, "why", "on one device"),
    Check("memory", "parameters", 8.0, 8.0, "why"),
    Check("traffic", "bytes", 0.0, 0.0, "why"),
)
FAILS = Check("memory", "parameters", 1.0, 0.0, "why")


class Judged(list[Case]):
    """Replaces `begin`: records its calls, judges `alarms` as false alarms, and is interrupted after `most` calls."""

    def __init__(self, alarms: Sequence[Case] = (), most: int = 1000) -> None:
        self.alarms, self.most = alarms, most

    def __call__(self, group: Sequence[Case], work_folder: Path, _: Any) -> Group:
        if not self.most:
            raise KeyboardInterrupt
        self.most -= 1
        folder = work_folder / f"{group[0].family}-{group[0].seed}"
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        self += group
        proofs: dict[Case, Any] = {case: Mock() for case in group}
        for case, proof in proofs.items():
            proof.verdict.return_value = Verdict([FAILS if case in self.alarms else HALF])
        return Group(folder, proofs)


def made(monkeypatch: pytest.MonkeyPatch, judged: Judged, output: Path, *argv: str) -> int:
    """Exit code of the job over fake proofs."""
    monkeypatch.setattr(false_alarms, "begin", judged)
    try:
        main(["--output", str(output), *argv])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_second_start_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    only = ("--seeds", "2", "--only", "ddp,fsdp,fp64")
    before, after, done = Judged(most=2), Judged(), Judged()
    with pytest.raises(KeyboardInterrupt):
        made(monkeypatch, before, tmp_path, *only)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"seed": 1, "fam')  # truncated by a kill
    assert made(monkeypatch, after, tmp_path, *only) == 0
    assert len(before) == 4 and len(after) == 6 and len({*before, *after}) == 8  # one group was begun but not judged
    assert made(monkeypatch, done, tmp_path, *only) == 0 and not done
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 8


def test_all_combinations_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    judged = Judged()
    assert made(monkeypatch, judged, tmp_path, "--seeds", "1") == 0
    assert len(judged) == len(set(judged)) == 2 * 4 * 3


def test_an_alarm_is_one_and_stays_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert made(monkeypatch, Judged([CASE]), tmp_path, "--seeds", "1") == NOT_EQUIVALENT
    assert "1 false alarms" in (output := capsys.readouterr().out)
    assert f"{CASE}: Not equivalent: 1 of 1 checks fail" in output
    assert (tmp_path / "alarms" / "llama-0" / "runs").is_dir()
    assert made(monkeypatch, Judged(), tmp_path, "--seeds", "1") == NOT_EQUIVALENT
    # the requested part is complete
    assert made(monkeypatch, Judged(), tmp_path, "--seeds", "1", "--only", "gpt2") == 0


@pytest.mark.parametrize("verdict", [Verdict([]), Verdict([HALF], open={"precision": "no run"}), Verdict([FAILS])])
def test_every_other_verdict_than_equivalent_is_an_alarm(verdict: Verdict) -> None:
    result = Result.of(CASE, verdict)
    assert result.alarm and Result.read(result.line()).alarm
    assert not Result.of(CASE, Verdict([HALF])).alarm


def test_margins() -> None:
    other = CASE._replace(seed=7)
    results = [Result.of(CASE, Verdict([HALF, ALL])), Result.of(other, Verdict([replace(HALF, value=3e-12), NOTHING]))]
    assert closest(results) == {
        "mathematics": (1.5, "loss, on one device", other),
        "memory": (1.0, "parameters", CASE),
        "traffic": (0.0, "bytes", other),
    }
    assert [Result.read(result.line()) for result in results] == results


@pytest.mark.parametrize(
    ("value", "bound"), [(np.nan, 1.0), (np.inf, 1.0), (1.0, 0.0), (1.0, np.nan), (0.0, np.nan), (np.inf, np.inf)]
)
def test_nan_is_beyond_any_bound(value: float, bound: float) -> None:
    check = Check("precision", "loss", value, bound, "why")
    assert share(check) == (1.0 if check.holds else np.inf)
    assert Result.read(Result.of(CASE, Verdict([check])).line()).shares[0][2] == share(check)


def test_runs_are_shared(tmp_path: Path) -> None:
    """One config with one start is trained once, by the command that a user's proof runs."""

    class Queue(list[Sequence[str]]):
        def submit(self, module: str, arguments: Sequence[str]) -> None:
            self.append([module, *arguments])

    start = tmp_path / "start"
    start.mkdir()
    known: dict[tuple[str, ...], Run] = {}
    commands, made = Queue(), []
    for mesh in MESHES.values():
        for policy in ("fp64", "fp32", "bf16"):
            values = cases.experiment("llama", tmp_path / "documents", STEPS)
            values |= {"parallel": mesh, "precision": {"policy": policy}}
            proof = SharedProof.of(Experiment.parse(values, source="test"), tmp_path, "cpu")
            proof = replace(proof, workers=commands, known=known, done={})  # type: ignore[arg-type]
            made.append({(side, kind): proof.run(side, kind, start) for side, kind in proof.needed()})
    # Per strategy: one device, twice on the JAX side, and reordered in bf16; per mesh: three precisions.
    assert len(commands) == len(known) == 2 * (3 + 2) + 4 * 3 * 2
    assert len({arguments[arguments.index("--output") + 1] for arguments in commands}) == len(commands)
    assert made[3]["jaxdist", "one"] is made[8]["jaxdist", "one"]  # fsdp and 2x2
    assert made[3]["jaxdist", "one"] is not made[0]["jaxdist", "one"]  # ddp
    assert made[3]["torch_ref", "policy"] is made[5]["torch_ref", "mesh"]
    assert not any("metrics" in vars(run) for run in known.values())  # queued; none has started


def leave_pid(folder: Path) -> None:
    (folder / str(os.getpid())).touch()


def renewed(folder: Path) -> tuple[list[set[int]], set[int]]:
    """Process ids of four runs, as two ranks make two runs each, and those alive at the end."""
    workers.RUNS = 2
    ranks, plan, seen = Ranks(), launch.plan(Parallel(mesh="2x1"), "cpu"), []
    for _ in range(4):
        ranks.start(plan, partial(leave_pid, folder))
        seen.append({int(file.name) for file in folder.iterdir()})
        for file in folder.iterdir():
            file.unlink()
    for process in active_children():
        process.join(0.1 if process.pid in seen[3] else 10)
    return seen, {process.pid for process in active_children() if process.pid}


@pytest.mark.long
@pytest.mark.slow
def test_ranks_are_renewed(tmp_path: Path) -> None:
    """Old ranks would keep the threads of all their process groups."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # ranks are forked, and this process may have threads
        seen, living = fresh.submit(renewed, tmp_path).result()
    assert seen[0] == seen[1] != seen[2] == seen[3]
    assert all(len(pids) == 2 for pids in seen)
    assert living == seen[3]


def test_compiled_programs_are_inherited() -> None:
    """Another seed inherits them, and keeps its own; another precision, mesh, length or rate does not."""

    class Machine:
        def __init__(self, experiment: Experiment) -> None:
            self.experiment = experiment

        @cached_property
        def compiled(self) -> object:
            return object()

    def machine(overrides: dict[str, Any], train: dict[str, Any] | None = None) -> Any:
        values = cases.experiment("llama", Path("documents"), STEPS)
        return Machine(Experiment.parse(values | overrides | {"train": values["train"] | (train or {})}, source="test"))

    inherit(Machine, lambda one: compiled_from(one.experiment))
    first = machine({})
    compiled = first.compiled
    assert machine({}, {"seed": 7}).compiled is compiled
    assert machine({}, {"seed": 7}).experiment.train.seed == 7
    for other in ({"parallel": {"mesh": "2x2"}}, {"precision": {"policy": "bf16"}}, {"optimizer": {"beta2": 0.9}}):
        assert machine(other).compiled is not compiled
    assert machine({}, {"steps": STEPS + 1}).compiled is not compiled


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--output DIR is missing"),
        (["--seeds", "0"], "--seeds 0: must be"),
        (["--seeds", "-1"], "--seeds -1: must be"),
        (["--seeds", "ten"], "--seeds ten: must be"),
        (["--only", "llama,fdsp"], "--only fdsp: .*did you mean 'fsdp'"),
        (["--only", ","], "--only : no family"),
        (["--steps", "3"], "unknown argument '--steps'"),
    ],
)
def test_bad_arguments(tmp_path: Path, argv: list[str], message: str) -> None:
    output = ["--output", str(tmp_path / "new")] if argv else []
    with pytest.raises(ConfigError, match=message):
        main([*output, *argv])
    assert not (tmp_path / "new").exists()


def test_results_of_other_code_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other rules judged them; a line without a stamp is refused too."""
    assert made(monkeypatch, Judged(), tmp_path, "--seeds", "1", "--only", "gpt2,fp64,ddp") == 0
    line = (tmp_path / RESULTS).read_text()
    assert f'"code": "{code()}"' in line
    for other in (line.replace(code(), "0" * 12), line.replace(f'"code": "{code()}", ', "")):
        (tmp_path / RESULTS).write_text(other)
        with pytest.raises(
            ConfigError, match=r"other code \((0{12}|unknown)\) made, this is .*; give another --output"
        ):
            main(["--output", str(tmp_path), "--seeds", "1"])


def test_the_stamp_covers_the_code_that_makes_and_judges_a_proof() -> None:
    root = Path(false_alarms.__file__).parents[2]
    names = {file.relative_to(root).as_posix() for file in stamp.sources() if not file.stem.endswith("_test")}
    of_a_side = ("train", "training/step", "training/optim", "accounting/traffic")
    needed = {f"{side}/{part}.py" for side in ("jaxdist", "torch_ref") for part in of_a_side}
    judging = ("validation/false_alarms", "runs/workers", "runs/cases", "proof/proof", "proof/levels")
    needed |= {f"parity_tests/{part}.py" for part in (*judging, "expected/memory_model")}
    assert names >= needed
    assert not any(part in name for part in ("convert", "checkpoint", "dcp") for name in names)


def test_proofs_of_one_start_are_one_piece_of_evidence() -> None:
    cases = [CASE._replace(seed=seed, mesh=mesh) for seed in (0, 1) for mesh in MESHES]
    results = [Result.of(case, Verdict([FAILS if case.seed else HALF])) for case in cases]
    assert table(results).title == ("8 proofs, 4 false alarms; of 2 independent starts (seed and family) 1 with one")


def test_results_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text('{"seed": 1}\n')
    with pytest.raises(ConfigError, match="is damaged"):
        main(["--output", str(tmp_path)])


@pytest.mark.slow
def test_one_for_real(tmp_path: Path) -> None:
    main(["--output", str(tmp_path), "--seeds", "1", "--only", "llama,fsdp,bf16"])
    (line,) = (tmp_path / RESULTS).read_text().splitlines()
    result = Result.read(line)
    assert not result.alarm and {level for level, _, _ in result.shares} == set(false_alarms.LEVELS)
