"""Prove that JAX and torch train the same run: `python -m parity_tests --config X --mesh 2x4 --output DIR`."""

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.progress import track

from jaxdist.command_line.arguments import Arguments, Parser, parse, user_path
from jaxdist.config import ConfigError
from jaxdist.convert.weights import described
from jaxdist.data import in_steps
from jaxdist.runs.display import console, say
from jaxdist.runs.folder import check_new, make_new
from parity_tests.proof.levels import FEWEST
from parity_tests.proof.proof import STEPS, Proof
from parity_tests.proof.verdict import Verdict
from parity_tests.runs.run import REFERENCES, Run, settings
from torch_ref.families.models import module_of
from torch_ref.training.optim import rule_of

OPTIONS: dict[str, dict[str, Any]] = {
    "--against": {
        "default": "torch",
        "metavar": "torch|transformers|RUN_DIR",
        "help": "the reference: torch_ref, Hugging Face's own model under DDP or FSDP2, or the run folder of any loop "
        "(default torch)",
    },
    "--first": {
        "type": int,
        "metavar": "N",
        "help": f"prove the first N steps of the run, under the schedule of them all (default {STEPS})",
    },
    "--bisect": {
        "action": "store_true",
        "help": "where the runs are not equivalent, find the first step and tensor in which they differ",
    },
}


def prove(argv: Sequence[str] | None = None) -> None:
    """Arguments -> starting weights -> the runs of both sides -> verdict.json and report.html."""
    proof, bisect, init = asked(list(sys.argv[1:] if argv is None else argv))
    make_new(proof.folder, f"--output {proof.folder}")
    start = proof.start(init)
    needed = proof.needed()
    for i, (side, kind) in enumerate(track(needed, "runs", console=console, disable=not console.is_terminal), 1):
        if not console.is_terminal:
            say(f"run {i} of {len(needed)}: {side}, {kind}")
        proof.run(side, kind, start)
    verdict = proof.verdict()
    if bisect and verdict.failed:
        say("searching for the first difference ...")
        divergence = proof.divergence(verdict, start)
        notes = verdict.notes if divergence else [*verdict.notes, proof.unfound]
        verdict = replace(verdict, divergence=divergence, notes=notes)
    verdict = proof.explained(verdict, start)
    write(proof, verdict)
    for line in (*verdict.notes, verdict.sentence):
        say(line)
    verdict.exit()


def asked(argv: list[str]) -> tuple[Proof, bool, Path | None]:
    """The proof that the arguments ask for, whether to search for the first difference, and the starting weights."""
    before = Parser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    before.add_argument("--against", **OPTIONS["--against"])
    known, _ = before.parse_known_args(argv)
    theirs = None if known.against in REFERENCES else run_at(known.against)
    if theirs and known.config is None:  # that of the run, with what else is given
        argv = ["--config", str(theirs.path / "config.toml"), *argv]
    a = parse(argv, "parity_tests", __doc__ or "", OPTIONS, described)
    a = replace(a, experiment=in_steps(a.experiment))
    for line in a.notes:
        say(line)
    if theirs is None:
        first = STEPS if a.more["first"] is None else a.more["first"]
        return Proof.of(a.experiment, check(a), a.device, known.against, first), a.more["bisect"], a.init
    if a.more["first"] is not None:
        raise ConfigError(f"--first {a.more['first']}: of {theirs.path} all steps are proved; leave it out")
    init = a.init or theirs.path / "start"
    if not init.exists():
        raise ConfigError(f"--against {theirs.path}: give the weights that it started from by --init, or as {init}")
    output = check(a)
    if output.resolve().is_relative_to(theirs.path.resolve()):
        raise ConfigError(f"--output {output} is in the run to be proved, {theirs.path}; give another folder")
    return Proof.against(theirs, a.experiment, output, a.device), a.more["bisect"], init


def run_at(text: str) -> Run:
    """The run folder of another loop. Raises ConfigError."""
    try:
        path = user_path(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--against {error}; give torch, transformers, or a run folder") from None
    if not (path / "config.toml").exists():
        raise ConfigError(
            f"--against {text}: not a run folder, it lacks config.toml; give torch, transformers, or a run"
        )
    run = Run(f"run {path.name}", path)
    run.check()
    run.check_names()
    return run


def check(a: Arguments) -> Path:
    """The output folder. Raises ConfigError for what this command cannot do, before anything is run."""
    if a.output is None:
        raise ConfigError("--output DIR is missing: the folder for the runs, verdict.json and report.html")
    check_new(a.output, f"--output {a.output}")
    if a.experiment.train.steps < FEWEST:
        raise ConfigError(
            f"train.steps = {a.experiment.train.steps}: a proof needs {FEWEST}, for one of them to be measured and the "
            f"loss to be judged; give --steps {FEWEST} or more, or a longer run"
        )
    if a.more["first"] is not None and a.more["first"] < FEWEST:
        raise ConfigError(f"--first {a.more['first']}: a proof needs {FEWEST} steps; give {FEWEST} or more")
    if a.experiment.parallel.sized:
        a.experiment.check_mesh(a.experiment.parallel.axes())
    if a.resume:
        raise ConfigError("--resume: a proof always starts again; leave it out")
    if a.more["against"] == "torch":  # before JAX has trained
        module_of(a.experiment.model)
        rule_of(a.experiment.optimizer)
    if a.more["against"] == "transformers":
        if find_spec("transformers") is None:
            raise ConfigError("--against transformers: it is not installed; pip install transformers")
        from parity_tests.runs.transformers_train import on_batch_axes

        on_batch_axes(a.experiment)
    return a.output


def write(proof: Proof, verdict: Verdict) -> None:
    """verdict.json and report.html."""
    from parity_tests.report import report

    verdict.write(proof.folder)
    kinds = [kind for kind in ("one", "mesh", "policy") if all((side, kind) in proof.done for side in proof.sides)]
    experiment = proof.experiment
    facts = {
        "model": f"{experiment.model.family}, {experiment.model.layers} layers of {experiment.model.dim}",
        "mesh": f"{experiment.parallel.mesh}, {experiment.parallel.strategy}",
        "precision": experiment.precision.policy,
        "steps": str(experiment.train.steps),
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    } | settings()
    pairs = {kind: proof.pair(kind) for kind in kinds}
    report.write(proof.folder / "report.html", verdict, pairs, facts, proof.bounds)
