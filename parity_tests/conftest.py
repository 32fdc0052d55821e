"""Runs shared by the tests of a session: each (side, model, settings) is trained once."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console
from rich.table import Table

pytest.importorskip("torch", reason="the parity suite needs torch: pip install 'jaxdist[test]'")

from jaxdist.families import models
from jaxdist.formats.dcp_index import EXPERIMENT
from jaxdist.runs.checkpoints import seal
from parity_tests.expected import collectives
from parity_tests.proof import levels
from parity_tests.proof.verdict import Check
from parity_tests.runs.cases import MODELS, experiment, write_documents
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import Run, command

STEPS = 20
FIGURES = "figures"  # the property that holds a comparison's measurements
Runs = Callable[..., Run]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the differences that the comparisons recorded, in float64 over 20 steps."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    rows = [dict(row) for report in reports for key, row in report.user_properties if key == FIGURES]
    if rows:
        table = Table(
            *rows[0],
            title=f"JAX - torch, float64, {STEPS} steps: largest relative difference; bytes per device and step",
        )
        for row in rows:
            table.add_row(*row.values())
        Console(width=140).print(table)


def run(side: str, path: Path, config: Path, overrides: Mapping[str, Any], *arguments: str) -> Run:
    """Train one side on the CPU into the folder `path`. Raises AssertionError with its output on failure."""
    flags = [text for name, value in overrides.items() for text in (f"--{name}", str(value))]
    line = ["--config", str(config), "--device", "cpu", "--output", str(path), *flags, *arguments]
    done = command(TRAIN[side], *line)
    assert done.returncode == 0, f"{side} {' '.join(flags)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Run(side, path)


@pytest.fixture(scope="session")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A config file per model, all on the same documents."""
    folder = tmp_path_factory.mktemp("experiments")
    documents = folder / "documents.jsonl"
    write_documents(documents)
    paths = {}
    for name in MODELS:
        paths[name] = folder / f"{name}.toml"
        values = experiment(name, documents, STEPS)
        paths[name].write_text(tomli_w.dumps(values), encoding="utf-8")
    return paths


class Start(dict[tuple[str, str], Path]):
    """Starting weights by side and model; a model's are made when a test first needs them."""

    def __init__(self, make: Callable[[str], dict[str, Path]]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, key: tuple[str, str]) -> Path:
        self.update({(side, key[1]): path for side, path in self.make(key[1]).items()})
        return self[key]


@pytest.fixture(scope="session")
def start(experiments: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starting weights, drawn by the JAX side's seed and converted for torch."""
    from jaxdist.convert.__main__ import main as convert

    def make(name: str) -> dict[str, Path]:
        folder = tmp_path_factory.mktemp(f"start-{name}")
        single = {"steps": 0, "precision": "fp32"}
        seed = run("jaxdist", folder / "jaxdist", experiments[name], single)
        convert([str(seed.path), str(folder / "hf"), "--to", "hf"])
        torch = run("torch_ref", folder / "torch_ref", experiments[name], single, "--init", str(folder / "hf"))
        return {"jaxdist": seed.path, "transformers": folder / "hf", "torch_ref": torch.path}

    return Start(make)


@pytest.fixture(scope="session")
def runs(
    experiments: dict[str, Path],
    start: dict[tuple[str, str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Runs:
    """runs(side, model, **settings) -> Run of 20 steps from the common start, made once per settings."""
    known: dict[Any, Run] = {}
    folder = tmp_path_factory.mktemp("runs")

    def get(side: str, model: str, settings: dict[str, Any]) -> Run:
        key = (side, model, *sorted(settings.items()))
        if key not in known:
            path = folder / f"{len(known)}-{side}-{model}"
            wrong = {name: value for name, value in settings.items() if name.startswith("model.")}
            source = mislabelled(start[side, model], folder / f"start-{len(known)}", wrong)
            known[key] = run(side, path, experiments[model], settings, "--init", str(source))
        return known[key]

    return get


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """mixed(side, model, **settings) -> Run of 20 steps from a common start, made once per settings."""
    from jaxdist.convert.__main__ import main as convert

    folder, known, starts = tmp_path_factory.mktemp("mixed"), dict[Any, Run](), dict[str, Path]()
    write_documents(folder / "documents.jsonl")

    def start(model: str, config: Path) -> Path:
        if model not in starts:
            config.write_text(tomli_w.dumps(experiment(model, folder / "documents.jsonl", STEPS)), encoding="utf-8")
            seed = run("jaxdist", folder / f"{model}-seed", config, {"steps": 0, "precision": "fp32"})
            starts[model] = folder / f"{model}-hf"
            convert([str(seed.path), str(starts[model]), "--to", "hf"])
        return starts[model]

    def get(side: str, model: str, settings: dict[str, Any]) -> Run:
        key = (side, model, *sorted(settings.items()))
        if key not in known:
            config = folder / f"{model}.toml"
            init = str(start(model, config))
            known[key] = run(side, folder / f"{len(known)}", config, settings, "--init", init)
        return known[key]

    return get


def as_if_on(run: Run, **mesh: int) -> Run:
    """A run whose summary names another mesh."""
    changed = Run(run.side, run.path)
    changed.summary["mesh"] = mesh
    return changed


def mislabelled(start: Path, copy: Path, wrong: dict[str, Any]) -> Path:
    """Copy a torch checkpoint and change its model's fields to `wrong`, to plant mistakes that `--init` refuses; the
    original without any."""
    if not wrong:
        return start
    shutil.copytree(start, copy)
    file = copy / "checkpoints" / "0" / EXPERIMENT
    values = json.loads(file.read_text(encoding="utf-8"))
    values["model"] |= {name.removeprefix("model."): value for name, value in wrong.items()}
    file.write_text(json.dumps(values), encoding="utf-8")
    seal(file.parent)
    return copy


Collectives = list[dict[str, Any]]


def counted(run: Run, change: Callable[[Collectives], Collectives] = lambda sent: sent) -> list[Check]:
    """Checks of collective counts after `change` was applied to the collectives."""
    experiment = run.experiment
    param_specs = models.param_specs(models.build(experiment.model))
    expected = collectives.expected(run.side, experiment, param_specs, run.summary["mesh"])
    changed = Run(run.side, run.path)
    changed.summary["collectives"] = change(run.summary["collectives"])
    return [c for c in levels.traffic(changed, {}, expected) if c.name.endswith("as many as expected")]
