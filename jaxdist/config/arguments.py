"""The command line of both backends: run arguments, shortcuts, and every config field as --section.field."""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args, get_origin

from jaxdist.config.errors import ConfigError, nearest
from jaxdist.config.experiment import MODELS, Experiment, read_toml
from jaxdist.config.model import Section

SHORTCUTS = {
    "mesh": "parallel.mesh",
    "strategy": "parallel.strategy",
    "precision": "precision.policy",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "seed": "train.seed",
}


# What an override makes obsolete of a resolved config: what followed from another policy, a fingerprint of other data.
FORGETS = {
    "precision.policy": ("parameters", "compute", "reduce", "loss_scale"),
    "train.epochs": ("steps",),
    "train.steps": ("epochs",),
    "data.path": ("fingerprint",),
    "data.tokenizer": ("fingerprint",),
    "data.text_field": ("fingerprint",),
    "data.bin_dtype": ("fingerprint",),
}


@dataclass(frozen=True)
class Arguments:
    """What a training command was asked to do."""

    config: Path | None
    experiment: Experiment
    device: str
    output: Path | None
    resume: bool
    init: Path | None
    more: Mapping[str, Any]
    """Options that only this command has."""


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, so that every bad input ends the same way."""

    def format_help(self) -> str:
        """With what each config field says of itself."""
        documented = fields()
        for action in self._actions:
            if action.dest in documented:
                table, default, _ = documented[action.dest]
                said = table.docstrings().get(action.dest.partition(".")[2], "")
                if default not in (None, "", ()):
                    said += f" (default {str(default).lower() if isinstance(default, bool) else default})"
                action.help = said.replace("%", "%%")
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")

    def parse_args(self, argv: Sequence[str]) -> Any:  # type: ignore[override]
        joined: list[str] = []
        for text in argv:  # argparse takes a value such as -1x4 for an option
            if joined and joined[-1].startswith("--") and re.match(r"-\d", text):
                joined[-1] += f"={text}"
            else:
                joined.append(text)
        namespace, unknown = self.parse_known_args(joined)
        if unknown:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            name = unknown[0].partition("=")[0]
            raise ConfigError(f"unknown argument {unknown[0]!r}; {nearest(name, flags)}")
        return namespace


def fields() -> dict[str, tuple[type[Section], Any, str]]:
    """Every config field: dotted name -> (the table that has it, default, what its value looks like)."""
    found: dict[str, tuple[type[Section], Any, str]] = {}
    for section, info in Experiment.model_fields.items():
        tables: tuple[type[Section], ...] = MODELS if section == "model" else (info.annotation,)  # type: ignore[assignment]
        for table in tables:
            for name, field in table.model_fields.items():
                shape = "|".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else "VALUE"
                found.setdefault(f"{section}.{name}", (table, field.get_default(), shape))
    return found


def add_fields(parser: argparse.ArgumentParser) -> None:
    """One option per config field, grouped by section; shortcuts are second names of theirs."""
    groups: dict[str, Any] = {}
    for dotted, (_, _, shape) in fields().items():
        section = dotted.partition(".")[0]
        group = groups.setdefault(section, parser.add_argument_group(section))
        names = [f"--{short}" for short, target in SHORTCUTS.items() if target == dotted] + [f"--{dotted}"]
        group.add_argument(*names, dest=dotted, default=argparse.SUPPRESS, metavar=shape)


def user_path(text: str) -> Path:
    """A path as a person writes it: with ~ for the home folder, short enough to be one, and no circle of links."""
    if not text:  # as of a variable that is not set; it would be taken for the folder we are in
        raise argparse.ArgumentTypeError("'' is no path; give one, or '.' for this folder")
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return path


def count(text: str, most: float = math.inf) -> int:
    """A whole number from 1, to `most`."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        upto = "" if most == math.inf else f" to {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1{upto}")
    return int(text)


def find_config(name: str | Path, option: str = "--config") -> Path:
    """A TOML path, or the name of a shipped config, which `option` asked for. Raises ConfigError."""
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return path
    package = Path(__file__).resolve().parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    shipped = {file.stem: file for file in folder.glob("*.toml")}
    if str(name) not in shipped:
        raise ConfigError(f"{option} {name}: neither a file nor a shipped config; {nearest(str(name), shipped)}")
    return shipped[str(name)]


def load(config: str | Path | None, overrides: dict[str, Any], option: str = "--config") -> Experiment:
    """A TOML file or shipped name (or the defaults), which `option` asked for, with dotted overrides on top."""
    if overrides.keys() >= {"train.steps", "train.epochs"}:
        raise ConfigError(
            f"--steps {overrides['train.steps']} --epochs {overrides['train.epochs']}: each says how long; give one"
        )
    values = read_toml(find_config(config, option), option) if config else {}
    for dotted in overrides:
        section = dotted.partition(".")[0]
        if not isinstance(table := values.setdefault(section, {}), dict):
            raise ConfigError(f"{section} = {table!r}: must be a table of fields")
        for field in FORGETS.get(dotted, ()):
            table.pop(field, None)
    for dotted, value in overrides.items():
        section, _, field = dotted.partition(".")
        values[section][field] = value
    return Experiment.parse(values, source=str(config or "arguments"))


def parse(
    argv: Sequence[str], program: str, description: str, options: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
) -> Arguments:
    """The arguments of a command that trains; `options` are its own, by flag, as argparse takes them.

    Raises ConfigError.
    """
    parser = Parser(
        prog=f"python -m {program}",
        usage="%(prog)s [--config PATH|NAME] [--mesh 2x4] [--output DIR] [--section.field VALUE ...]",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="PATH|NAME",
        help="a TOML file, or the name of a shipped config (default: the small default)",
    )
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help="run folder: config, metrics, summary, checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    parser.add_argument(
        "--init",
        type=user_path,
        metavar="CHECKPOINT",
        help="start from these weights: a run folder, a checkpoint or a Hugging Face folder",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs if there are enough, else the CPU (default auto)",
    )
    own = [parser.add_argument(flag, **option).dest for flag, option in options.items()]
    add_fields(parser)
    given = vars(parser.parse_args(argv))
    run = {name: given.pop(name) for name in ("config", "output", "resume", "init", "device")}
    if run["resume"] and run["output"] is None:
        raise ConfigError("--resume needs --output DIR, the run folder to go on with")
    if run["init"] is not None and not run["init"].exists():
        raise ConfigError(f"--init {run['init']}: no such file or folder; give a checkpoint that exists")
    run["more"] = {name: given.pop(name) for name in own}
    return Arguments(experiment=load(run["config"], given), **run)
