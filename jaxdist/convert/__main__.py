"""Convert checkpoints between Hugging Face, torch, torch's distributed checkpoints and Orbax, or list their tensors."""

import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import jax
import numpy as np

from jaxdist.command_line.arguments import Parser, load_before_fields, load_model, user_path
from jaxdist.command_line.plugins import add_plugins, load_named
from jaxdist.config import ConfigError, exit_codes
from jaxdist.config.bounded import parse
from jaxdist.convert.content import PARAMETERS, Content, Leaves
from jaxdist.convert.kinds import hf, peft
from jaxdist.convert.kinds.registry import (
    KINDS,
    check_folder_name,
    check_kind,
    check_name,
    target_kind,
    targets,
    with_article,
)
from jaxdist.convert.mappings import mapped
from jaxdist.convert.mappings.mapped import Pytree, Remapping, holds_tensors, is_tree
from jaxdist.convert.mappings.mapping import MAPPINGS, KeyMapping, find_mapping
from jaxdist.convert.optimizers.rates import Peak
from jaxdist.convert.replacing import check_apart, check_replaceable
from jaxdist.convert.stream import DTYPES, Conversion, NonFinite, Resharder
from jaxdist.convert.target import atomic_target, check_room, check_target, writing
from jaxdist.convert.verify import comparing, unchanged, verify, verify_source, verify_tensors
from jaxdist.convert.vocabulary import exported, resized
from jaxdist.formats.companions import CONFIG, companions
from jaxdist.formats.hf import notes_on, read_folder
from jaxdist.formats.naming import broken_tables, family_of
from jaxdist.formats.sources import kind_at, kind_of
from jaxdist.runs.checkpoints import Damaged, complete_checkpoint, run_of
from jaxdist.runs.display import aside, megabytes, say, transfer

NAMED = 8  # of what stays behind
KEEP_OR_ZERO = "Give a source without them; or --nonfinite zero, which writes 0 in their place, or --nonfinite keep"


def main(argv: Sequence[str] | None = None) -> None:
    """Arguments -> what is converted, and into what -> check -> stream -> verify; or list.

    A run folder stands for its newest complete checkpoint, also where the newest turns out to be damaged on the way.
    """
    a = arguments(sys.argv[1:] if argv is None else argv)
    jax.config.update("jax_platforms", "cpu")  # no accelerator is needed, and none should be held
    if a.inspect:
        with aside(a.json):
            inspect(a.source, a.json)
        return
    check_apart(
        a.target, {"SOURCE": a.source, "--mapping": a.mapping, "--like": a.like, "--adapter": a.adapter}, a.force
    )
    try:
        convert(a)
    except Damaged as error:  # as was found while it was read
        if run_of(error.args[0]) != a.source.absolute():
            raise
        a.source = complete_checkpoint(a.source)  # of the run, an older one
        convert(a)


def convert(a: Any) -> None:
    """Write TARGET. Raises ConfigError, TrainingError."""
    conversion, target = by_mapping(KeyMapping.load(find_mapping(a.mapping)), a) if a.mapping else by_kind(a)
    conversion = replace(conversion, nonfinite=a.nonfinite)
    replaceable = partial(check_replaceable, a.target, target.files) if a.force else None
    if a.dry_run:
        check_target(a.target, replaceable)
        check_room(a.target, conversion.bytes)
        target.check(conversion)
        say("nothing was written: --dry-run")
        return
    with atomic_target(a.target, replaceable) as partial_path:
        check_room(a.target, conversion.bytes)
        with comparing(target.source) as wait:
            target.check(conversion)
            with unchanged(wait), writing(a.target), transfer(conversion.bytes) as report:
                target.write(partial_path, replace(conversion, report=report))
                conversion.refuse(a.source, KEEP_OR_ZERO)
        if a.verify:
            for line in target.verify(partial_path, conversion):
                say(line)
    for name, found in conversion.found.items():
        say(f"{a.source}: tensor {name} has {found}, written as 0")
    say(f"wrote {megabytes(conversion.bytes)} to {a.target}")


class Target(NamedTuple):
    """Writing of a conversion to a path, with the checks before and the verification after."""

    write: Callable[[Path, Any], None]
    verify: Callable[[Path, Any], Iterator[str]]
    check: Callable[[Any], object] = lambda conversion: None
    source: Path | None = None  # a checkpoint whose large files are still to be compared with its manifest
    files: Mapping[str, bytes] = MappingProxyType({})  # that are written besides the weights


def by_kind(a: Any) -> tuple[Conversion, Target]:
    """A checkpoint of one of our families. Raises ConfigError."""
    kind = kind_of(a.source)
    source, target = KINDS[kind], KINDS[a.to or target_kind(kind, a.target)]
    check_name(a.target, target)
    target.check_writes()
    wanted = load_model(a.model, "--model") if a.model else None
    if a.peak and not source.rates:
        having = ", ".join(name for name, kind in KINDS.items() if kind.rates)
        raise ConfigError(
            f"--peak: SOURCE {a.source} is {with_article(source.title)}; it belongs to {having}; leave it out"
        )
    decided = {"peak": a.peak} if a.peak else {}
    content = source.format.read_content(a.source, wanted, training=target.state or a.ema, **decided)
    if a.peak and content.updates is None:
        raise ConfigError(f"--peak {a.peak}: no optimizer state is read from {a.source}; leave it out")
    if a.adapter:
        content = peft.merged(content, a.source, a.adapter, lambda file: KINDS["torch"].format.described(file))
    if a.ema:
        content = content.averaged(a.source)
    elif source.state and not target.state:
        say(f"{with_article(target.title)} holds weights alone: what else training needs stays behind")
    dtype = a.dtype or (dtype_before(content) if target is KINDS["hf"] else None)
    content = content if target.state else content.weights()
    content = resized(content, wanted.model) if wanted else content
    content = content if target.padded else exported(content)
    conversion = Conversion(content, target.naming_of(content), dtype=dtype)
    what = f"{content.experiment.model.family}, {summary(conversion)}"
    if target.state:
        what += f", step {content.step}"
    if content.updates is not None:
        what += f", with the state of {content.experiment.optimizer.name}"
    say(f"{source.title} {a.source} -> {target.title} {a.target}: {what}")
    if left := content.origin.left:
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        say(f"{a.source}: what stays behind: {', '.join(left[:NAMED])}{more}")
    if dtype != a.dtype:
        say(f"the weights are written in {dtype}, as those that training began with; --dtype says another")
    for line in training_notes(a.source, conversion, to_folder=target is KINDS["hf"]):
        say(line)
    for line in verify_source(a.source) if a.verify else ():
        say(line)
    # Its module may import torch, which takes seconds: the source is being read by then.
    return conversion, Target(
        lambda path, c: target.format.write(path, c),
        partial(verify, target, a.adapter or a.source),  # transformers would compute the base without the adapter
        lambda c: target.format.check(c),
        content.checkpoint,
        # A config.json gives way in any case: its checkpoint does, and the new one says itself which model it is of.
        {CONFIG: b"", **(content.origin.files if target is KINDS["hf"] else {})},
    )


def dtype_before(content: Content) -> str | None:
    """The dtype of the folder that a run began with, where it trained in another; None where there is none."""
    origin = content.origin
    trained = origin.init or (origin.kind == "hf" and content.step > origin.step)
    if not trained or origin.dtype not in DTYPES:
        return None
    now = {leaf.dtype for leaf in content.groups[PARAMETERS].values() if leaf.dtype.kind not in "iu"}
    return None if now == {np.dtype(DTYPES[origin.dtype])} else origin.dtype


def training_notes(source: Path, conversion: Conversion, to_folder: bool) -> list[str]:
    """Notes on settings of the config.json, read or written, that transformers applies in training and jaxdist does
    not."""
    if (source / CONFIG).is_file():
        return read_folder(source)[1]
    return [f"{CONFIG}: {note}" for note in notes_on(parse(hf.check(conversion)))] if to_folder else []


def summary(conversion: Resharder) -> str:
    """One line that describes the conversion."""
    parameters = conversion.groups[PARAMETERS]
    dtypes = ", ".join(sorted({str(leaf.dtype) for leaf in parameters.values()}))
    return f"{len(parameters)} parameters in {dtypes}, {megabytes(conversion.bytes)}"


def arguments(argv: Sequence[str]) -> Any:
    """The command line. Raises ConfigError."""
    load_before_fields(argv)
    parser = Parser(prog="python -m jaxdist.convert", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "source",
        type=user_path,
        metavar="SOURCE",
        help="a run folder, a checkpoint, a Hugging Face folder or a torch file",
    )
    parser.add_argument("target", type=user_path, nargs="?", metavar="TARGET", help="folder or torch file to write")
    parser.add_argument(
        "--to",
        metavar=f"{{{','.join(targets())}}}",
        help="kind of the target (default: torch for *.pt, hf from orbax, else orbax)",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="dtype of the written weights (default: that of SOURCE)")
    parser.add_argument(
        "--model",
        type=user_path,
        metavar="CONFIG",
        help="a TOML file or shipped config that the weights must fit; needed if SOURCE does not state its model",
    )
    parser.add_argument(
        "--mapping",
        type=user_path,
        metavar="FILE",
        help="convert a model of your own by this key mapping, a file or a shipped mapping "
        f"({', '.join(sorted(MAPPINGS))}): an Orbax checkpoint of a pytree <-> safetensors",
    )
    parser.add_argument(
        "--like",
        type=user_path,
        metavar="CHECKPOINT",
        help="with --mapping: a checkpoint with the names and shapes to write, of the kind of TARGET (Orbax or "
        "safetensors); required if SOURCE is safetensors; config.json and tokenizer of its folder are copied",
    )
    parser.add_argument(
        "--nonfinite",
        choices=get_args(NonFinite),
        default="refuse",
        help="response to NaN or infinite values and negative second moments: refuse (default), keep, or write NaN and "
        "infinity as zero",
    )
    parser.add_argument(
        "--adapter", type=user_path, metavar="FOLDER", help="merge a PEFT LoRA adapter into the weights of SOURCE"
    )
    parser.add_argument(
        "--peak",
        choices=get_args(Peak),
        help="peak learning rate for a torch optimizer that states only its current rate: schedule, of --model or its "
        "own config; now, the current rate (default: schedule, if it gives the current rate)",
    )
    parser.add_argument("--ema", action="store_true", help="convert the moving average of the weights")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="verify the checksums of a torch file, read TARGET back, and compare every bit and the logits (in memory)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything except the numbers, and print what would be written"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing TARGET, once the new one is complete")
    parser.add_argument("--inspect", action="store_true", help="list the tensors of SOURCE: name, shape, dtype, bytes")
    parser.add_argument(
        "--json", action="store_true", help="with --inspect: print one JSON object; print everything else to stderr"
    )
    add_plugins(parser)
    a = parser.parse_args(argv)
    if a.inspect and a.target:
        raise ConfigError(f"--inspect with TARGET {a.target}: inspecting writes nothing; leave one of them out")
    if not a.inspect and a.target is None:
        raise ConfigError("TARGET is missing; give a folder to write, or --inspect to list the tensors of SOURCE")
    if not a.inspect and a.json:
        raise ConfigError("--json belongs to --inspect; leave it out")
    for option in ("to", "dtype", "model", "peak", "adapter", "ema", "verify", "dry_run", "force"):
        if a.inspect and getattr(a, option):
            raise ConfigError(f"--inspect with --{option.replace('_', '-')}: inspecting writes nothing; leave one out")
    if a.verify and a.nonfinite == "zero":
        raise ConfigError("--verify with --nonfinite zero: TARGET is to differ from SOURCE; leave one out")
    if a.dry_run and a.verify:
        raise ConfigError("--dry-run with --verify: nothing is written that could be read again; leave one out")
    for option in ("to", "model", "peak", "adapter", "inspect", "ema"):
        if a.mapping and getattr(a, option):
            raise ConfigError(f"--{option} with --mapping {a.mapping}: SOURCE determines the direction; leave it out")
    if a.like and not a.mapping:
        raise ConfigError("--like belongs to --mapping; leave it out")
    load_named(a.plugins, a.source)
    if a.to:
        check_kind(a.to)  # which a plugin of SOURCE may have registered
    return a


def by_mapping(mapping: KeyMapping, a: Any) -> tuple[Remapping, Target]:
    """A model that is none of our families, in the direction that SOURCE shows. Raises ConfigError."""
    theirs = holds_tensors(a.source)
    if theirs and not a.like:
        raise ConfigError(
            f"SOURCE {a.source} is torch's: give --like, an Orbax checkpoint with the tree and shapes to write"
        )
    if a.like and holds_tensors(a.like) == theirs:
        raise ConfigError(
            f"--like {a.like} is of SOURCE's own kind; give one of TARGET's: "
            + ("an Orbax checkpoint" if theirs else "a safetensors file, or a folder with model.safetensors")
        )

    def verified(read: Callable[[Path], Leaves], line: str) -> Callable[[Path, Resharder], Iterator[str]]:
        def lines(path: Path, conversion: Resharder) -> Iterator[str]:
            yield from verify_tensors(conversion, {PARAMETERS: read(path)})
            yield line
            if undecided := getattr(conversion, "undecided", ()):
                yield (
                    f"not verified: axis and transform of {len(undecided)} parameters, {undecided[0]} first: others "
                    "fit their shapes too; compare logits of both models"
                )

        return lines

    known = (
        f"verified: names and shapes are those of {a.like}"
        if a.like
        else "not verified: whether the mapping is right, as nothing else than it was there to compare with; --like "
        "FILE, the safetensors of the torch model, compares names and shapes"
    )
    if theirs:
        check_folder_name(a.target, "Orbax checkpoint of a pytree")
        like = Pytree(a.like)
        conversion = mapped.to_ours(a.source, mapping, a.dtype, like)
        write = partial(mapped.write_ours, tree=like.tree)
        target = Target(write, verified(lambda path: Pytree(path).leaves, known), source=mapped.manifest_of(a.like))
    else:
        conversion, left = mapped.to_theirs(a.source, mapping, a.dtype, a.like)
        if left:
            say(f"{a.source}: what stays behind: {', '.join(left)}")
        if not (single := a.target.suffix == ".safetensors"):
            check_folder_name(a.target, "folder with model.safetensors", ", or of a .safetensors file")
        files = companions(a.like) if a.like and a.like.is_dir() and not single else {}
        write = partial(mapped.write_theirs, single=single, companions=files)
        target = Target(
            write,
            verified(mapped.read_theirs, known),
            mapped.check_theirs,
            source=mapped.manifest_of(a.source),
            files=files,
        )
    say(f"{a.source} -> {a.target}: {summary(conversion)}")
    return conversion, target


def inspect(source: Path, as_json: bool) -> None:
    """Print every tensor of the source's model, and the totals; also of what only --mapping converts."""
    kind, title, tensors = described(source)
    family = family_of(tensors)
    for name, error in broken_tables().items():
        say(f"the names of family {name} are not recognized: {error}")
    rows: list[Mapping[str, Any]] = [
        {"name": name, "shape": list(t.shape), "dtype": str(t.dtype), "bytes": t.bytes}
        for name, t in sorted(tensors.items())
    ]
    total = sum(row["bytes"] for row in rows)
    if as_json:
        listing = {"source": str(source), "kind": kind, "family": family, "tensors": rows, "bytes": total}
        print(json.dumps(listing))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        shape = "×".join(map(str, row["shape"]))
        say(f"{row['name']:{width}}  {shape:>16}  {row['dtype']:>8}  {row['bytes']:>15,}")
    say(f"{title}, family {family}: {len(rows)} tensors, {megabytes(total)}")


def described(source: Path) -> tuple[str, str, Leaves]:
    """The kind of the source, its description, and its tensors. Raises ConfigError."""
    if kind_at(source) is None and is_tree(source):
        tensors = source.is_file() or holds_tensors(source)
        kind, title = ("safetensors", "safetensors") if tensors else ("pytree", "pytree of Orbax")
        return kind, title, mapped.read_theirs(source) if tensors else Pytree(source).leaves
    kind = kind_of(source)
    return kind, KINDS[kind].title, KINDS[kind].format.described(source)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as Ctrl-C does, it leaves nothing behind
    gc.disable()  # what a conversion makes has no cycles, and torch, imported later, is half a million objects
    exit_codes(main)
