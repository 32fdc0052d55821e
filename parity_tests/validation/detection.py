"""Measure how many planted mistakes the proof detects and names: `python -m parity_tests.validation.detection`.

Each mistake of `parity_tests/validation/mistakes` is planted in one run of one side. The proof of
`python -m parity_tests` then judges it together with right runs, made once per configuration, by the same checks and
the same search for the first divergence. A mistake is detected when the level that must catch it fails; its culprit is
right when it names the place where the planted code first acts.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from safetensors.numpy import load_file, save_file

from jaxdist.command_line.arguments import Parser, user_path
from jaxdist.config import ConfigError, Experiment, TrainingError, exit_codes
from jaxdist.config.errors import nearest, writes_to
from jaxdist.config.registry import FAMILIES
from jaxdist.runs.display import console, say
from jaxdist.runs.folder import check_writable
from parity_tests.proof import levels
from parity_tests.proof.proof import Proof
from parity_tests.proof.verdict import LEVELS, Verdict
from parity_tests.runs.cases import DEEP, IMAGES, MIXTURES, MODELS, write_documents, write_images
from parity_tests.runs.run import Run
from parity_tests.runs.stamp import code
from parity_tests.validation.mistakes import FOLDER, Mistake, table

NAMED_RIGHT = 0.9  # share of culprits that must be right; all mistakes must be detected
MISSED = 3  # exit code otherwise
WIDTH = 150  # columns of the closing table, also without a terminal
FOUND = "findings.jsonl"
QUICK = "--xla_backend_optimization_level=0"  # the same program, compiled in half the time

# Four steps: two of warm-up, two of decay, neither half-way, where linear and cosine decay agree. The last one is not
# recorded: there torch counts its memory and traffic.
BASE: dict[str, dict[str, Any]] = {
    "model": MODELS["llama"],
    "data": {"documents": "padded", "sequence": 32},
    "train": {"steps": 4, "batch": 8, "validation_batches": 0},
    "optimizer": {"learning_rate": 0.01, "warmup": 2, "decay_steps": 5, "clip": 0.5},
    "precision": {"policy": "fp64"},
    "record": {"steps": [1, 2, 3], "tensors": "all"},
}
MAKER = {FOLDER: "torch_ref"}  # side without a command -> the side that makes its runs
CONFIGURATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {},
    "gpt2": {"model": MODELS["gpt2"]},
    "accumulation": {"train": {"accumulation": 2}},
    # With all tensors recorded torch computes all logits at once.
    "chunks": {"memory": {"loss_chunks": 3}, "record": {"tensors": "gradients"}},
    "ddp": {"train": {"accumulation": 2}, "parallel": {"mesh": "4x1", "strategy": "ddp"}},
    "zero1": {"parallel": {"mesh": "4x1", "strategy": "zero1"}},
    "hybrid": {"parallel": {"mesh": "data=2,fsdp=2"}},
    "kept": {"train": {"accumulation": 2}, "parallel": {"mesh": "4x1", "reshard_after_forward": False}},
    "offload": {"memory": {"offload": ["optimizer", "parameters"]}, "parallel": {"mesh": "4x1"}},
    "2x2": {"parallel": {"mesh": "2x2"}},
    "sequence": {"model": MODELS["gpt2"], "parallel": {"mesh": "2x2", "sequence": True}},
    "context": {"parallel": {"mesh": "fsdp=2,context=2"}},
    "adam": {"optimizer": {"name": "adam", "ema": 0.9}},
    "sgd": {"optimizer": {"name": "sgd", "nesterov": True, "learning_rate": 0.1}},
    "lion": {"optimizer": {"name": "lion", "learning_rate": 1e-3, "beta2": 0.99}},
    "adafactor": {"optimizer": {"name": "adafactor"}, "parallel": {"mesh": "2x2"}},
    "muon": {"optimizer": {"name": "muon", "momentum": 0.95, "nesterov": True}, "parallel": {"mesh": "2x2"}},
    "mixture": {"model": MIXTURES["mixtral"]},
    "experts": {"model": MIXTURES["mixtral"], "parallel": {"mesh": "fsdp=2,expert=2"}},
    "balanced": {"model": MIXTURES["mixtral"], "train": {"accumulation": 2}, "parallel": {"mesh": "2x1"}},
    "capped": {"model": MIXTURES["qwen3_moe"], "parallel": {"mesh": "fsdp=2,expert=2"}},
    "capped context": {"model": MIXTURES["qwen3_moe"], "parallel": {"mesh": "context=2"}},
    "stages": {
        "model": DEEP["gpt2, 4 layers"], "train": {"accumulation": 4}, "parallel": {"mesh": "pipeline=2,fsdp=2"},
    },
    "interleaved": {
        "model": DEEP["llama, 4 layers"], "train": {"accumulation": 2},
        "parallel": {"mesh": "pipeline=2", "pipeline_schedule": "Interleaved1F1B", "virtual_stages": 2},
    },
    "images": {"model": IMAGES},
    "images on a mesh": {"model": IMAGES, "parallel": {"mesh": "2x1"}},
    "scaled": {"precision": {"policy": "fp64", "loss_scale": 1024, "growth_interval": 2}},
    "fp32": {"precision": {"policy": "fp32"}, "parallel": {"mesh": "2x1"}},
    # Steps as small as in a real run: below bfloat16's resolution.
    "bf16": {"precision": {"policy": "bf16"}, "parallel": {"mesh": "2x1"}, "optimizer": {"learning_rate": 3e-4}},
    # After two good steps the scale is so large that float16 overflows; it is reduced for the fourth.
    "fp16": {
        "precision": {"policy": "fp16", "growth_interval": 2, "growth_factor": 2.0**16, "backoff_factor": 2.0**-16},
        "parallel": {"mesh": "2x1"}, "optimizer": {"learning_rate": 3e-4}, "train": {"steps": 5},
    },
    FOLDER: {"precision": {"policy": "fp32"}, "parallel": {"mesh": "1x1"}},
}  # fmt: skip


@dataclass
class Trial(Proof):
    """A proof of few steps whose runs keep all tensors; `mistake`, if any, is planted in runs of its side.

    If the reference is a run folder, torch_ref makes it.
    """

    mistake: Mistake | None = None
    right: "Trial | None" = None  # the proof without the mistake

    def entry(self, side: str) -> tuple[str, ...]:
        maker = MAKER.get(side, side)
        planted = self.mistake and self.mistake.side == maker
        return (
            ("parity_tests.validation.mistakes", self.mistake.name)
            if self.mistake and planted
            else super().entry(maker)
        )

    def needed(self) -> list[tuple[str, str]]:
        folder = [(self.reference, "policy")] if self.reference in MAKER else []
        return super().needed() + folder

    def recorded(self, key: tuple[str, str], steps: list[int], start: Path) -> Run:
        run = self.done[key]
        return run if run.records.keys() >= set(steps) else super().recorded(key, steps, start)

    @property
    def noise(self) -> levels.Noise:
        """The noise of the correct code, so that a mistake in JAX needs no second run."""
        return self.right.noise if self.right else super().noise

    def planted(self, mistake: Mistake, folder: Path) -> "Trial":
        """This proof with right runs and `mistake` in its side."""
        return replace(self, mistake=mistake, folder=folder, right=self, done=dict(self.done), known=dict(self.known))

    def judge(self, start: Path) -> Verdict:
        """Make the wrong run, used for every run of its config, and the one that shows its noise, and judge."""
        if self.mistake:
            for side, kind in self.needed():
                planted = MAKER.get(side, side) == self.mistake.side and kind != "perturbed"
                if planted and (kind == "reordered" or self.config(kind) == self.config("policy")):
                    self.run(side, kind, start)
        verdict = self.verdict()
        return replace(verdict, divergence=self.divergence(verdict, start)) if verdict.failed else verdict


@dataclass
class Benchmark:
    """Right runs by configuration, made on demand, and the trials over them."""

    folder: Path
    trials: dict[str, Trial] = field(default_factory=dict)
    starts: dict[str, Path] = field(default_factory=dict)
    known: dict[tuple[str, ...], Run] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.documents = self.folder / "documents.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_documents(self.documents)
        self.images = self.folder / "images.npz"
        write_images(self.images)

    def start(self, trial: Trial) -> Path:
        """Starting weights of a model, none at its neutral value: norms are not 1, biases not 0."""
        model = trial.experiment.model
        family = f"{model.family}-{model.layers}"
        if family not in self.starts:
            folder = Trial(trial.experiment, self.folder / "starts" / family, "cpu").start()
            random = np.random.default_rng(0)
            for file in folder.glob("*.safetensors"):
                found = {n: w for n, w in read(file) if w.ndim}
                arrays = {n: w + (w.ndim == 1) * 0.1 * random.standard_normal(w.shape) for n, w in found.items()}
                counts = {n: w for n, w in read(file) if not w.ndim}
                save_file({n: w.astype(np.float32) for n, w in arrays.items()} | counts, file)
            self.starts[family] = folder
        return self.starts[family]

    def right(self, configuration: str) -> Trial:
        """Proof of a configuration with all of its runs made. Raises TrainingError if it does not hold."""
        if configuration not in self.trials:
            changes = CONFIGURATIONS[configuration]
            values = {s: BASE.get(s, {}) | changes.get(s, {}) for s in BASE.keys() | changes.keys()}
            values |= {s: changes[s] for s in ("model", "precision") if s in changes}
            input_kind = FAMILIES[values["model"]["family"]].config.input_kind
            values["data"] |= {"path": str(self.images if input_kind == "images" else self.documents)}
            experiment = Experiment.parse(values, source=configuration)
            reference = configuration if configuration in MAKER else "torch"
            folder = self.folder / "right" / configuration
            trial = Trial(experiment, folder, "cpu", reference, xla_flags=QUICK, known=self.known)
            start = self.start(trial)
            for side, kind in trial.needed():
                trial.run(side, kind, start)
            if (verdict := trial.judge(start)).word != "equivalent":
                raise TrainingError(f"{configuration}: the right code is found wrong. {verdict.sentence}")
            self.trials[configuration] = trial
        return self.trials[configuration]

    def find(self, mistake: Mistake) -> "Finding":
        """Plant the mistake and judge. The wrong run is removed."""
        trial = self.right(mistake.configuration)
        folder = self.folder / "wrong" / mistake.name
        try:
            return Finding.of(mistake, trial.planted(mistake, folder).judge(self.start(trial)))
        except (ConfigError, TrainingError) as error:  # a failed run detects nothing: the row needs fixing
            failed = Finding.of(mistake, Verdict([]))
            return replace(failed, named=f"the run failed: {str(error).strip().splitlines()[-1]}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def read(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays of a file, sorted by name."""
    yield from sorted(load_file(file).items())


@dataclass(frozen=True)
class Finding:
    """The proof's result for a mistake: failing checks, by level, and the named culprit."""

    mistake: str
    side: str
    what: str
    level: str
    culprits: tuple[str, ...]
    checks: tuple[str, ...]
    named: str
    step: int

    @classmethod
    def of(cls, m: Mistake, verdict: Verdict) -> "Finding":
        failed = sorted(verdict.failed, key=lambda check: LEVELS.index(check.level))
        checks = tuple(f"{check.level}/{check.title}" for check in failed)
        divergence = verdict.divergence
        named = divergence.tensor if divergence else next(iter(checks), "")
        step = divergence.step if divergence else 0
        return cls(m.name, m.side, m.what, m.level, m.culprits, checks, named, step)

    @property
    def detected(self) -> bool:
        """Mistakes by the level that must catch them."""
        return any(check.startswith(f"{self.level}/") for check in self.checks)

    @property
    def right(self) -> bool:
        return any(fnmatch(self.named, culprit) for culprit in self.culprits)

    @property
    def levels(self) -> list[str]:
        return [level for level in LEVELS if any(check.startswith(f"{level}/") for check in self.checks)]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"detected": self.detected, "right": self.right}


def show(findings: Sequence[Finding]) -> Table:
    """The findings as a table."""
    shown = Table("mistake", "detected by", "culprit named", "right", title="Planted mistakes")
    for f in findings:
        named = f"{f.named}, step {f.step}" if f.step else f.named
        detected = ", ".join(f.levels) if f.detected else f"[red]not by {f.level}[/red]"
        shown.add_row(f.mistake, detected, named, "yes" if f.right else f"[red]no: {' or '.join(f.culprits)}[/red]")
    return shown


def chosen(argv: Sequence[str]) -> tuple[Path, list[Mistake]]:
    """--output DIR, and the rows requested by --only NAME,... (default: all). Raises ConfigError."""
    parser = Parser(prog="python -m parity_tests.validation.detection", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--output",
        required=True,
        type=user_path,
        metavar="DIR",
        help=f"folder for detection.json and the runs; mistakes already in its {FOUND} from the same code are skipped",
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="mistakes to plant (default: all)")
    a, rows = parser.parse_args(argv), table()
    names = [name.strip() for name in a.only.split(",")] if a.only else list(rows)
    for name in names:
        if name not in rows:
            raise ConfigError(f"--only {name}: no such mistake; {nearest(name, rows)}")
    order = list(CONFIGURATIONS)
    chosen = sorted((rows[name] for name in names), key=lambda row: order.index(row.configuration))
    check_writable(a.output, f"--output {a.output}")
    return a.output, chosen


@cache
def benchmark_of(output: Path) -> Benchmark:
    """This process's trials, whose runs serve all its configurations."""
    return Benchmark(output / str(os.getpid()))


def find_all(output: Path, names: Sequence[str], stamp: str) -> list[Finding]:
    """Results for these mistakes, each printed and saved as soon as it is known. Raises TrainingError if the correct
    code fails the proof."""
    findings = []
    for name in names:
        findings.append(f := benchmark_of(output).find(table()[name]))
        with (output / FOUND).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"code": stamp} | asdict(f)) + "\n")
        say(f"{f.mistake}: {', '.join(f.levels) or 'not detected'}; {f.named or 'nothing'} named")
    return findings


def found_before(output: Path, stamp: str) -> Iterator[Finding]:
    """Results saved earlier by the same code, without a last line truncated by a kill."""
    text = (output / FOUND).read_text(encoding="utf-8") if (output / FOUND).exists() else ""
    for line in text.split("\n")[:-1]:
        values = json.loads(line)
        if values.pop("code") == stamp:
            lists = {name: tuple(values[name]) for name in ("culprits", "checks")}
            yield Finding(**values | lists)


@writes_to("--output")
def main(argv: Sequence[str] | None = None) -> None:
    """Measure every mistake, as many configurations at a time as there are cores -> a table, detection.json, two
    shares."""
    output, rows = chosen(sys.argv[1:] if argv is None else argv)
    began, wrong = time.perf_counter(), list[str]()
    stamp = code()  # current stamp: later edits are not what runs
    output.mkdir(parents=True, exist_ok=True)
    found = {finding.mistake: finding for finding in found_before(output, stamp)}
    say(f"{len(rows)} mistakes, {sum(row.name not in found for row in rows)} left to plant, in code {stamp}")
    groups = [
        [row.name for row in alike if row.name not in found]
        for _, alike in groupby(rows, lambda row: row.configuration)
    ]
    with (
        ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool,
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        task = progress.add_task("mistakes", total=len(rows))
        jobs = [pool.submit(find_all, output, names, stamp) for names in sorted(groups, key=len, reverse=True) if names]
        for job in as_completed(jobs):
            try:
                found |= {finding.mistake: finding for finding in job.result()}
            except TrainingError as error:
                wrong.append(str(error))
            progress.update(task, completed=len(found))
    if wrong:
        raise TrainingError("\n".join(wrong))
    findings = [found[row.name] for row in rows]
    detected = sum(f.detected for f in findings) / len(findings)
    named = sum(f.right for f in findings) / len(findings)
    seconds = time.perf_counter() - began
    result = {
        "mistakes": len(findings),
        "detected": detected,
        "named_right": named,
        "configurations_without_a_mistake": len(groups),  # each is equivalent
        "seconds": round(seconds),
        "code": stamp,
    }
    text = json.dumps(result | {"findings": [f.as_json() for f in findings]}, indent=2) + "\n"
    (output / "detection.json").write_text(text, encoding="utf-8")
    Console(width=max(console.width, WIDTH)).print(show(findings))
    say(f"{len(findings)} mistakes: {detected:.1%} detected, {named:.1%} of the culprits right, {seconds / 60:.0f} min")
    if detected < 1 or named < NAMED_RIGHT:
        sys.exit(MISSED)


if __name__ == "__main__":
    exit_codes(main)
