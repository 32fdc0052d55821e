"""The command line of both backends: run arguments, shortcuts, and every config field as --section.field."""

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from jaxdist.command_line.plugins import add_plugins, load_named, merged
from jaxdist.config.aliases import FAMILY, flag_here, plain
from jaxdist.config.data import Data
from jaxdist.config.errors import ConfigError, OtherShapes, closest, nearest
from jaxdist.config.experiment import Experiment, as_argument, section_type
from jaxdist.config.model import Model, held_by_weights, model_differences, same_model
from jaxdist.config.names import OneOf
from jaxdist.config.plugins import load_plugins, plugins_of
from jaxdist.config.registry import FAMILIES, default_family, described_families
from jaxdist.config.section import Section
from jaxdist.formats.described import HF_CONFIG, RUN_CONFIG, Source, config_notes, folder_of, read_config, source_of

SHORTCUTS = {
    "mesh": "parallel.mesh",
    "strategy": "parallel.strategy",
    "precision": "precision.policy",
    "steps": "train.steps",
    "epochs": "train.epochs",
    "seed": "train.seed",
}


# Fields of a resolved config that an override resets: those derived from another policy, the fingerprint of other data.
FORGETS = {
    "precision.policy": ("parameters", "compute", "reduce", "loss_scale"),
    "train.epochs": ("steps",),
    "train.steps": ("epochs",),
    "data.path": ("fingerprint",),
    "data.source": ("fingerprint",),
    "data.tokenizer": ("fingerprint",),
    "data.text_field": ("fingerprint",),
    "data.bin_dtype": ("fingerprint",),
    "data.split": ("fingerprint",),
    "data.end_of_text": ("fingerprint",),
}


@dataclass(frozen=True)
class Arguments:
    """The parsed command line of a training command."""

    config: Path | None
    experiment: Experiment
    device: str
    output: Path | None
    resume: bool
    init: Path | None
    more: Mapping[str, Any]
    """Options that only this command has."""
    notes: Sequence[str] = ()
    """Lines on the starting weights, and on a config.json used as config, to print at the start."""
    model_stated: bool = True
    """False where nothing says what model the starting weights are of: they are read for the default model."""

    @property
    def companions_of(self) -> Path | None:
        """The weights to start from, or the folder that is the config: an export of the run is to have the tokenizer
        and what else lies beside them."""
        if self.init or not self.config:
            return self.init
        folder = self.config.parent if self.config.name == HF_CONFIG else self.config
        return folder if folder.is_dir() else None

    @contextmanager
    def reading_weights(self) -> Iterator[None]:
        """Context manager for reading the starting weights.

        Raises ConfigError where they do not fit a default model that nobody asked for.
        """
        try:
            yield
        except OtherShapes as error:
            if self.model_stated:
                raise
            problem = str(error).rpartition(";")[0].removeprefix(f"{self.init}: ")
            raise ConfigError(
                f"--init {self.init}: the file does not say what model it is, and does not fit the default model "
                f"({problem}); give its config, as --config PATH|NAME with its [model] section"
            ) from None


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are ConfigErrors, so that every bad input ends the same way."""

    def format_help(self) -> str:
        """Include the documentation of each config field."""
        documented = fields()
        for action in self._actions:
            if action.dest in documented:
                table, default, _ = documented[action.dest]
                help_text = table.docstrings().get(action.dest.partition(".")[2], "")
                if action.dest == FAMILY:
                    help_text += f" {described_families()}."
                if default not in (None, "", ()):
                    help_text += f" (default {str(default).lower() if isinstance(default, bool) else default})"
                action.help = help_text.replace("%", "%%")
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
            raise ConfigError("\n".join(self._explain(unknown)))
        return namespace

    def _explain(self, unknown: Sequence[str]) -> Iterator[str]:
        """A message for each unknown flag; a word without dashes after one is its value."""
        for text, following in zip(unknown, [*unknown[1:], "--"], strict=True):
            if not text.startswith("-") and text != unknown[0]:
                continue
            flag, _, value = text.partition("=")
            flag = flag if flag.startswith("-") else f"--{flag}"  # as name=value of Hydra and OmegaConf
            argument = value or (None if following.startswith("-") else following)
            yield f"unknown argument {text!r}; {self._hint(flag, argument)}"

    def _hint(self, flag: str, value: str | None) -> str:
        """The flag to use in place of an unknown one: by its meaning, its last part, or its spelling."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        if hint := flag_here(flag, value, flags, SHORTCUTS):
            return hint
        name = plain(flag.lstrip("-"))
        last = name.rpartition(".")[2]
        same = [known for known in flags if known.rpartition(".")[2].lstrip("-") == last]
        if not same:  # within the section that is named, or by the last part: whole names share their section
            section = f"{flag.partition('.')[0]}."
            within = [known for known in flags if known.startswith(section)] if "." in flag else []
            written = {known.rpartition(".")[2].lstrip("-"): known for known in within or flags}
            same = [written[close]] if (close := closest(last, written)) else []
        return f"did you mean {' or '.join(map(repr, same))}?" if same else "see --help"


def fields() -> dict[str, tuple[type[Section], Any, str]]:
    """Every config field: dotted name -> (the table that has it, default, what its value looks like)."""
    found: dict[str, tuple[type[Section], Any, str]] = {}
    for section, info in Experiment.sections().items():
        tables: Iterable[Any] = (info.annotation,)
        if section == "model":
            tables = dict.fromkeys(row.config for row in FAMILIES.values())
        for table in tables:
            for name, field in table.model_fields.items():
                names = FAMILIES if f"{section}.{name}" == FAMILY else choices(field)
                shape = "|".join(names) or "VALUE"
                found.setdefault(f"{section}.{name}", (table, field.get_default(), shape))
    return found


def choices(field: FieldInfo) -> Sequence[str]:
    """The values that a field takes, where they are names; empty for any other field."""
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    return [name for named in field.metadata if isinstance(named, OneOf) for name in named.rows]


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
        raise argparse.ArgumentTypeError("'' is not a path; give one, or '.' for this folder")
    try:
        path = Path(text).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return path


def positional(doc: str | None, *names: str) -> list[Path]:
    """The paths that a script's command line gives, one for each of `names`. Ends the process with what `doc` says of
    the script on --help (0), and with its usage on another number of paths (2)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name, type=Path)
    return list(vars(parser.parse_args()).values())


def count(text: str, most: float = math.inf) -> int:
    """A whole number from 1, to `most`."""
    if not text.isdecimal() or not 1 <= int(text) <= most:
        upto = "" if most == math.inf else f" to {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1{upto}")
    return int(text)


def find_config(name: str | Path, option: str = "--config") -> Path:
    """A path that exists or ends in .toml, or the file of a shipped config by its name, which `option` asked for.

    Raises ConfigError.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        return path
    package = Path(__file__).resolve().parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    shipped = {file.stem: file for file in folder.glob("*.toml")}
    if str(name) not in shipped:
        raise ConfigError(f"{option} {name}: neither a file nor a shipped config; {nearest(str(name), shipped)}")
    return shipped[str(name)]


def load(
    config: str | Path | None, overrides: dict[str, Any], option: str = "--config", start: Source | None = None
) -> Experiment:
    """A config (or the defaults), which `option` asked for, with dotted overrides on top.

    Where the config has no model section, the model is that of the weights to `start` from. Raises ConfigError.
    """
    if overrides.keys() >= {"train.steps", "train.epochs"}:
        raise ConfigError(
            f"--steps {overrides['train.steps']} --epochs {overrides['train.epochs']}: each says how long; give one"
        )
    values = read_config(find_config(config, option), option) if config else {}
    sections = {name: value for name, value in overrides.items() if name != "plugins"}
    if plugins := merged(values.get("plugins"), overrides.get("plugins", ())):
        values["plugins"] = plugins
    load_plugins(plugins_of(values))
    own_model = "model" in values
    if start and not own_model:
        values = _over(start.tables(), values)
        _check_family(values["model"], f"--init {start.path}", overrides)
    elif own_model:
        _check_family(values["model"], f"{option} {config}", overrides)
    for dotted in sections:
        section = dotted.partition(".")[0]
        if not isinstance(table := values.setdefault(section, {}), dict):
            raise ConfigError(f"{section} = {table!r}: must be a table of fields")
        for field in FORGETS.get(dotted, ()):
            table.pop(field, None)
    for dotted, value in sections.items():
        section, _, field = dotted.partition(".")
        values[section][field] = value
    try:
        experiment = Experiment.parse(values, str(config or "arguments"), weight_fields(start.model) if start else ())
    except ConfigError as error:
        if start and not own_model and (flags := _contradicting(overrides, start.model)):
            problem = str(error).splitlines()[0].rpartition("; ")[0] or str(error)
            raise ConfigError(f"{problem}; leave out {' '.join(flags)}: --init gives the model") from None
        raise
    if start:
        _check_start(experiment, start, overrides, f"{option} {config}" if own_model else "")
    return experiment


def load_model(config: str | Path, option: str) -> Experiment:
    """A config for a command that reads no data: a sequence length that it does not set is within its positions.
    Raises ConfigError."""
    values = read_config(find_config(config, option), option)
    model, data = (table if isinstance(table := values.get(name), dict) else {} for name in ("model", "data"))
    positions = model.get("positions")
    shorter = type(positions) is int and 0 < positions < Data().sequence and "sequence" not in data
    return load(config, {"data.sequence": positions} if shorter else {}, option)


def weight_fields(model: Model) -> Iterator[str]:
    """Config fields that weights of `model` determine."""
    return (f"model.{name}" for name in held_by_weights(model) if name != "vocab")


def _over(below: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Merge `values` over the tables `below`."""
    tables = {name: below.get(name, {}) | table for name, table in values.items() if isinstance(table, dict)}
    return below | values | tables


def _check_family(model: Any, source: str, overrides: Mapping[str, Any]) -> None:
    """Raises ConfigError where a flag asks for another family than that of the model section of a `source`, which has
    fields that no such model has."""
    if not isinstance(model, dict) or "model.family" not in overrides:
        return
    wanted, found = overrides["model.family"], model.get("family", default_family())
    fields = section_type("model", {"model": {"family": wanted}}).model_fields
    if wanted != found and (lacking := [f"model.{name}" for name in model if name not in fields]):
        flags = " ".join(f"--{name}" for name in overrides if name.startswith("model."))
        raise ConfigError(
            f"model.family = {wanted!r}, but {source} holds another model, with {found!r}, and {lacking[0]} is a field "
            f"of that; leave out {flags}: {source.partition(' ')[0]} gives the model"
        )


def _contradicting(overrides: Mapping[str, Any], model: Model) -> list[str]:
    """The flags that give a field which weights of the `model` hold another value."""
    both = {*weight_fields(model)} & {*overrides}
    values = {name: as_argument(getattr(model, name.partition(".")[2])) for name in both}
    return [f"--{name}" for name in overrides if values.get(name, overrides[name]) != overrides[name]]


def _check_start(experiment: Experiment, start: Source, overrides: Mapping[str, Any], config: str) -> None:
    """Raises ConfigError where the weights to start from are of another model, with the change that agrees with them:
    of flags alone, or of the `config` that has a model section."""
    different = model_differences(experiment.model, start.model)
    flags = [f"--{name}" for field in different if (name := f"model.{field}") in overrides]
    recorded = {field: there for field, (_, there) in different.items()}
    if config.startswith("--resume"):
        fix = f"leave out --init {start.path}: the run continues with its own weights"
    elif not config:
        fix = f"leave out {' '.join(flags)}: --init gives the model"
    elif "family" in different:
        fix = f"leave out {config} and every --model flag: --init gives the model then"
    else:
        fix = f"give {' '.join(f'--model.{field} {as_argument(there)}' for field, there in recorded.items())}"
    same_model(experiment.model, start.model, f"--init {start.path}", fix)


def parse(
    argv: Sequence[str],
    program: str,
    description: str,
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    describe: Callable[[Path], Source | None] = source_of,
) -> Arguments:
    """The arguments of a command that trains; `options` are its own, by flag, as argparse takes them.

    `describe` returns the model of the weights to start from, where it can. Raises ConfigError.
    """
    load_before_fields(argv)
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
        help="a TOML file, the name of a shipped config, a Hugging Face folder or a run folder (default: the small "
        "default, or with --init the model of the weights)",
    )
    parser.add_argument(
        "--output", type=user_path, metavar="DIR", help="run folder: config, metrics, summary, checkpoints"
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        type=user_path,
        const=True,
        default=False,
        metavar="DIR",
        help="continue from the newest checkpoint in DIR, or in --output; without --config, by that run's config",
    )
    parser.add_argument(
        "--init",
        type=user_path,
        metavar="CHECKPOINT",
        help="starting weights: a run folder, a checkpoint or a Hugging Face folder",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "gpu"),
        default="auto",
        help="auto: GPUs if the mesh has that many, else CPU devices (default auto)",
    )
    own = [parser.add_argument(flag, **option).dest for flag, option in options.items()]
    add_plugins(parser)
    add_fields(parser)
    parsed = vars(parser.parse_args(argv))
    run = {name: parsed.pop(name) for name in ("config", "output", "resume", "init", "device")}
    _resolve_resume(run)
    if run["init"] is not None and not run["init"].exists():
        raise ConfigError(f"--init {run['init']}: no such file or folder; give a checkpoint that exists")
    run["more"] = {name: parsed.pop(name) for name in own}
    run["init"] = run["init"] and folder_of(run["init"])
    start = describe(run["init"]) if run["init"] else None
    of_run = run["resume"] and run["config"] is None and (run["output"] / RUN_CONFIG).is_file()
    config, option = (run["output"], "--resume") if of_run else (run["config"], "--config")
    experiment = load(config, parsed, option, start)
    if run["init"]:
        experiment = experiment.pinning(weight_fields(experiment.model))
    notes = dict.fromkeys((*(start.notes if start else ()), *config_notes(run["config"])))
    stated = not run["init"] or start or config or any(name.startswith("model.") for name in parsed)
    return Arguments(experiment=experiment, notes=tuple(notes), model_stated=bool(stated), **run)


def load_before_fields(argv: Sequence[str]) -> None:
    """Load the plugins that a command line names, itself or by its config or runs, whose families have options of their
    own. Raises ConfigError; where help is asked for, a plugin that fails is a note."""
    parser = Parser(add_help=False, allow_abbrev=False)
    add_plugins(parser)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config", type=user_path)
    for run in ("--output", "--init"):
        parser.add_argument(run, type=user_path)
    parser.add_argument("--resume", nargs="?", type=user_path, const=None)
    a = parser.parse_known_args(argv)[0]
    try:
        load_named(a.plugins, a.output, a.resume, a.init)
        load_plugins(_plugins_of_config(a.config) if a.config else ())
    except ConfigError as error:
        if not a.help:
            raise
        print(f"not in this help: {error}", file=sys.stderr)


def _plugins_of_config(path: Path) -> Sequence[str]:
    """The plugins of what --config gives; none where it cannot be read, which `load` says."""
    with suppress(ConfigError, OSError):
        return plugins_of(read_config(find_config(path)))
    return ()


def _resolve_resume(run: dict[str, Any]) -> None:
    """Turn `--resume DIR` into `--output DIR --resume`. Raises ConfigError."""
    folder, output = run["resume"], run["output"]
    if isinstance(folder, Path):
        if output is not None and output.absolute() != folder.absolute():
            raise ConfigError(
                f"--resume {folder} --output {output}: a run continues in its own folder; give one of them"
            )
        if not (folder / RUN_CONFIG).is_file():
            raise ConfigError(f"--resume {folder}: it is not a run, as it has no {RUN_CONFIG}; {_instead(folder)}")
        run["output"], run["resume"] = folder, True
    elif folder and output is None:
        raise ConfigError("--resume needs the folder of the run to continue with; give --resume DIR")


def _instead(folder: Path) -> str:
    """The fix for a --resume whose path is not a run folder."""
    run = next((parent for parent in folder.parents if (parent / RUN_CONFIG).is_file()), None)
    if run:
        return f"it belongs to the run {run}: give --resume {run}, which continues from its newest checkpoint"
    within = sorted(folder.iterdir()) if folder.is_dir() else []
    if run := next((path for path in within if (path / RUN_CONFIG).is_file()), None):
        return f"there is one within it: give --resume {run}"
    if folder.is_file() or within:
        return (
            f"to begin with it, give {'--config' if folder.suffix == '.toml' else '--init'} {folder} and a new --output"
        )
    return f"begin one by --output {folder}, or give the folder of a run"
