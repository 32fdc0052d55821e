"""Measure how often the proof calls equal runs different, a slow job: `python -m parity_tests.validation.false_alarms`.

Both sides train each seed's weights and data order on every combination of family, mesh and precision, and the proof
judges. It consists of the same commands as a user's proof, with fewer steps, but they run within one process per side,
which imports, traces and compiles once, and proofs share equal runs. Restarted, it continues.
"""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from jaxdist.command_line.arguments import Parser, user_path
from jaxdist.config import ConfigError, Experiment, Model, exit_codes
from jaxdist.config.errors import nearest, writes_to
from jaxdist.convert.kinds.hf import write_hf
from jaxdist.families import models
from jaxdist.runs.display import console, say
from jaxdist.runs.folder import check_writable
from jaxdist.runs.folder import replace as write_atomically
from parity_tests.proof.proof import Proof
from parity_tests.proof.verdict import LEVELS, NOT_EQUIVALENT, Check, Verdict
from parity_tests.runs import cases
from parity_tests.runs.run import Run
from parity_tests.runs.stamp import code
from parity_tests.runs.workers import Workers

SEEDS = 100
STEPS = 8
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"mesh": "4x1", "strategy": "ddp"},
    "fsdp": {"mesh": "4x1"},
    "2x2": {"mesh": "2x2"},
    "hybrid": {"mesh": "data=2,fsdp=2"},
}
DEVICES = 4  # of the largest mesh
AXES = {"family": tuple(cases.MODELS), "mesh": tuple(MESHES), "precision": ("fp64", "fp32", "bf16")}
RESULTS = "proofs.jsonl"


class Case(NamedTuple):
    """One proof to make."""

    seed: int
    family: str
    mesh: str
    precision: str

    def __str__(self) -> str:
        return f"{self.family} {self.mesh} {self.precision}, seed {self.seed}"


@dataclass(frozen=True)
class Result:
    """Result of a combination: the verdict, and the largest share of a bound used in each level; 1 is the full
    bound."""

    case: Case
    verdict: str
    sentence: str
    shares: Sequence[tuple[str, str, float]]  # level, check, value / bound
    code: str  # stamp of the code that made it

    @classmethod
    def of(cls, case: Case, verdict: Verdict) -> "Result":
        last = {check.level: check for check in sorted(verdict.checks, key=share)}
        shares = [(c.level, c.key, share(c)) for c in last.values()]
        return cls(case, verdict.word, verdict.sentence, shares, code())

    @property
    def alarm(self) -> bool:
        return self.verdict != "equivalent"

    def line(self) -> str:
        """A line of JSON; NaN and infinity are text."""
        shares = [[level, name, x if x < float("inf") else repr(x)] for level, name, x in self.shares]
        fields = {"verdict": self.verdict, "sentence": self.sentence, "code": self.code, "shares": shares}
        return json.dumps(self.case._asdict() | fields)

    @classmethod
    def read(cls, line: str) -> "Result":
        values = json.loads(line)
        shares = [(level, name, float(x)) for level, name, x in values["shares"]]
        case = Case(*(values[f] for f in Case._fields))
        return cls(case, values["verdict"], values["sentence"], shares, values.get("code", "unknown"))


def share(check: Check) -> float:
    """value / bound; infinite for a failing NaN, 1 if an infinite bound is reached."""
    if not check.holds:
        return check.value / check.bound if check.bound > 0 and check.value < float("inf") else float("inf")
    return 0.0 if check.value == 0 else 1.0 if check.value == check.bound else check.value / check.bound


# ---- running


@dataclass
class SharedProof(Proof):
    """A proof whose commands are queued, and which shares a run of the same config with other proofs."""

    workers: Workers | None = None
    pending: list[tuple[str, Future[int]]] = field(default_factory=list)

    def train(self, side: str, config: str, path: Path, *arguments: str) -> Run:
        if path in {run.path for run in self.known.values()}:
            path = path.with_name(f"{path.name}-{len(self.known)}")
        return super().train(side, config, path, *arguments)

    def finish(self, module: str, *arguments: str) -> None:
        assert self.workers is not None
        self.pending.append((module, self.workers.submit(module, arguments)))

    def verdict(self) -> Verdict:
        """Verdict over the finished runs. Raises ConfigError or TrainingError if one failed."""
        assert self.workers is not None
        for module, future in self.pending:
            self.workers.wait(module, future)
        return super().verdict()


def draw(model: Model, seed: int, folder: Path) -> Path:
    """Starting weights of a seed in a Hugging Face folder. Biases are random too, as in a trained model."""
    random = np.random.default_rng(seed)
    weights = {
        name: (spec.mean + (spec.std or model.init_std) * random.standard_normal(spec.shape)).astype(np.float32)
        for name, spec in models.param_specs(models.build(model)).items()
    }
    folder.mkdir()
    write_hf(folder, model, weights)
    return folder


class Group(NamedTuple):
    """The proofs of one family and seed, with the same starting weights; their runs are in `folder`."""

    folder: Path
    proofs: dict[Case, SharedProof]


def begin(group: Sequence[Case], work_folder: Path, workers: Workers) -> Group:
    """Queue all runs of the proofs of a group."""
    seed, family, *_ = group[0]
    folder = work_folder / f"{family}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted start
    folder.mkdir()
    documents, start = folder / "documents.jsonl", folder / "start"
    cases.write_documents(documents)
    known: dict[tuple[str, ...], Run] = {}
    proofs = {}
    for case in group:
        values = cases.experiment(family, documents, STEPS)
        values["train"] |= {"seed": seed}
        values |= {"parallel": MESHES[case.mesh], "precision": {"policy": case.precision}}
        proof = SharedProof.of(Experiment.parse(values, source=str(case)), folder, "cpu")
        proofs[case] = replace(proof, workers=workers, known=known)
    draw(proofs[group[0]].experiment.model, seed, start)
    for proof in proofs.values():
        for side, kind in proof.needed():
            proof.run(side, kind, start)
    return Group(folder, proofs)


# ---- the job


@writes_to("--output")
def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> remaining proofs -> a line of proofs.jsonl for each -> the table."""
    output, wanted = arguments(sys.argv[1:] if argv is None else argv)
    output.mkdir(parents=True, exist_ok=True)
    results = [result for result in resumed(output / RESULTS) if result.case in wanted]
    missing = sorted(wanted - {result.case for result in results})
    say(f"{len(wanted)} proofs, {len(missing)} left to make, of code {code()}")
    work_folder = output.absolute() / "work"
    work_folder.mkdir(exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the workers must not outlive it
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(work_folder, DEVICES))
        advance = stack.enter_context(shown(len(wanted), len(results)))
        begun = (begin(list(group), work_folder, workers) for _, group in groupby(missing, lambda case: case[:2]))
        for group, _ in pairwise(chain(begun, [None])):  # the next one trains while this one is judged
            assert group is not None
            found = [Result.of(case, proof.verdict()) for case, proof in group.proofs.items()]
            if any(result.alarm for result in found):  # an alarm's runs are kept
                shutil.copytree(group.folder, output / "alarms" / group.folder.name, dirs_exist_ok=True)
            shutil.rmtree(group.folder)
            with (output / RESULTS).open("a", encoding="utf-8") as file:
                file.writelines(result.line() + "\n" for result in found)
            results += found
            advance(results)
    shutil.rmtree(work_folder)
    console.print(table(results))
    alarms = [result for result in results if result.alarm]
    for result in alarms:
        say(f"{result.case}: {result.sentence}")
    if alarms:
        sys.exit(NOT_EQUIVALENT)


def arguments(argv: Sequence[str]) -> tuple[Path, set[Case]]:
    """The output folder and the requested proofs. Raises ConfigError."""
    parser = Parser(prog="python -m parity_tests.validation.false_alarms", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help=f"folder for {RESULTS}; results in it are not computed again"
    )
    parser.add_argument("--seeds", default=str(SEEDS), metavar="N", help=f"seeds 0 to N - 1 (default {SEEDS})")
    names = "; ".join(f"{axis}: {', '.join(values)}" for axis, values in AXES.items())
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"combinations to run ({names}; default: all)")
    a = parser.parse_args(argv)
    if a.output is None:
        raise ConfigError(f"--output DIR is missing: the folder for {RESULTS}")
    check_writable(a.output, f"--output {a.output}")
    if not a.seeds.isdecimal() or int(a.seeds) < 1:
        raise ConfigError(f"--seeds {a.seeds}: must be a whole number from 1")
    chosen = selected([name.strip() for name in a.only.split(",")] if a.only else [])
    families, meshes, precisions = chosen.values()
    seeds = range(int(a.seeds))
    return a.output, {Case(s, f, m, p) for s in seeds for f in families for m in meshes for p in precisions}


def selected(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Values of each of AXES among `names`, or all if there are none. Raises ConfigError."""
    known = [value for values in AXES.values() for value in values]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: no family, mesh or precision; {nearest(name, known)}")
    return {axis: tuple(v for v in values if v in names) or values for axis, values in AXES.items()}


def resumed(file: Path) -> list[Result]:
    """Results of an earlier start; a truncated last line is dropped from the file.

    Raises ConfigError for an unreadable file, and for results of other code, which judged by other rules.
    """
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    try:
        results = [Result.read(line) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {error!r}; repair or remove it") from None
    for result in results:
        if result.code != code():
            raise ConfigError(
                f"{file} has proofs that other code ({result.code}) made, this is {code()}; give another --output"
            )
    write_atomically(file, "".join(line + "\n" for line in lines))
    return results


@contextmanager
def shown(total: int, before: int) -> Iterator[Callable[[Sequence[Result]], None]]:
    """A progress bar over `total` proofs, of which `before` exist; off a terminal a line per call of the function it
    yields."""
    began = time.monotonic()
    columns = TextColumn("proofs"), BarColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=total, completed=before)

        def advance(results: Sequence[Result]) -> None:
            done = len(results)
            each = (time.monotonic() - began) / (done - before)
            left = timedelta(seconds=round(each * (total - done)))
            alarms = sum(result.alarm for result in results)
            text = f"{done}/{total}, {alarms} alarms, {each:.1f} s each, {left} left"
            bar.update(task, completed=done, description=text)
            if not console.is_terminal:
                say(text)

        yield advance


def closest(results: Iterable[Result]) -> dict[str, tuple[float, str, Case]]:
    """Largest share of a bound that a check used, with the check and the proof, by level."""
    found: dict[str, tuple[float, str, Case]] = {}
    for result in results:
        for level, name, x in result.shares:
            if level not in found or x > found[level][0]:
                found[level] = x, name, result.case
    return {level: found[level] for level in LEVELS if level in found}


def table(results: Sequence[Result]) -> Table:
    """Proofs, alarms, and the closest check of each level relative to its bound.

    Proofs of one seed and family share weights, data and float64 runs: their alarms are likely to coincide, so the
    evidence is the number of such groups.
    """
    alarms, groups = ({result.case[:2] for result in found} for found in ([r for r in results if r.alarm], results))
    title = (
        f"{len(results)} proofs, {sum(result.alarm for result in results)} false alarms; of {len(groups)} independent "
        f"starts (seed and family) {len(alarms)} with one"
    )
    table = Table("level", "value / bound", "check", "proof", title=title)
    for level, (x, name, case) in closest(results).items():
        table.add_row(level, f"{x:.2g}", name, str(case))
    return table


if __name__ == "__main__":
    exit_codes(main)
