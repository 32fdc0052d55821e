"""Following the fix of a config's message literally, each of several, leads to an accepted config."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from jaxdist.command_line.arguments import SHORTCUTS, parse
from jaxdist.config import ConfigError
from jaxdist.config.config_test import BAD, INTERLEAVED, MIXED
from jaxdist.config.experiment import Experiment
from jaxdist.config.parallel import AXES
from jaxdist.formats.described import EXPERIMENT
from jaxdist.runs.folder import RunFolder

Line = dict[str, str]
Checks = Callable[[Experiment, dict[str, int]], None]
VALUE = "\0"  # replaces the variable parts of a message
DEVICES = 16
ROUNDS = 8  # fixes that may be needed one after another; more are a circle
ASSIGNED = re.compile(r"(?:--)?([a-z]+\.[a-z_0-9]+|(?<=--)[a-z]+)(?: = | )([^\s,;:]+(?:,[^\s,;:]+)*)")
RESNET = ["--model.family", "resnet"]
GPT2 = ["--model.family", "gpt2"]
ULYSSES = ["--parallel.context", "ulysses", "--parallel.sequence", "true"]

# Rows of the table of bad input that no value replaces: for misspelt names and wrong kinds of values the message lists
# what is known, which `aliases_test` follows.
KINDS = {"gpt3", "three", "fp8", "weights", "fsdp2", "2x4x2", "2xfour", "fsdp=2,fsdp=4", "fsdp=2,tenser=4"}
NAMES = ("--resume", "--init", "--config", "--steps", "--data.path", "--model.layrs", "--model.window")
BAD_VALUES = [argv for argv, _ in BAD if len(argv) > 1 and not {*argv} & {*NAMES, *KINDS}]
FURTHER = [
    ["--mesh", "tensor=12,fsdp=2"],
    ["--mesh", "fsdp=3,tensor=5"],
    ["--mesh", "fsdp=-1,tensor=3,expert=7", *MIXED],
    ["--mesh", "data=-1,tensor=-1", "--strategy", "ddp"],
    ["--mesh", "context=3", "--data.sequence", "100"],
    ["--mesh", "context=3,tensor=2", *ULYSSES],
    ["--mesh", "data=2,fsdp=3,tensor=2", "--strategy", "ddp"],
    ["--mesh", "data=4,tensor=3"],
    ["--mesh", "expert=5", *MIXED],
    ["--mesh", "pipeline=5", *INTERLEAVED],
    ["--mesh", "pipeline=3", "--model.layers", "7", *INTERLEAVED],
    ["--mesh", "pipeline=2,tensor=2", "--memory.offload", "parameters"],
    ["--mesh", "7x1", "--train.accumulation", "4"],
    ["--train.batch", "9", "--train.accumulation", "6"],
    ["--model.heads", "6", "--model.kv_heads", "4"],
    ["--model.rope_low_freq_factor", "5"],
    ["--parallel.reduce", "microbatch", "--strategy", "zero1"],
    ["--parallel.reshard_after_forward", "false", "--strategy", "zero2"],
    ["--optimizer.name", "sgd", "--optimizer.nesterov", "true", "--optimizer.momentum", "0"],
    ["--precision", "fp32", "--precision.parameters", "float64"],
    [*GPT2, "--model.heads", "7"],
    [*RESNET, "--memory.remat", "full", "--memory.offload", "optimizer"],
    [*RESNET, "--memory.loss_chunks", "4"],
    [*RESNET, "--mesh", "tensor=2", "--parallel.sequence", "true"],
    [*RESNET, "--mesh", "fsdp=16", "--model.stem", "24"],
    [*RESNET, "--model.widths", "30,64", "--model.depths", "1,1"],
    [*RESNET, "--optimizer.name", "muon"],
    [*RESNET, "--data.pixel_std", "0"],
]


def line_of(argv: list[str]) -> Line:
    """Field, or flag without one -> value."""
    return {SHORTCUTS.get(flag[2:], flag[2:]): value for flag, value in zip(argv[::2], argv[1::2], strict=True)}


def argv_of(line: Line) -> list[str]:
    return [text for name, value in line.items() for text in (f"--{name}", value)]


def refusal(line: Line, *checks: Checks) -> str:
    """Message for a command line; empty if it is accepted."""
    try:
        arguments = parse(argv_of(line), "jaxdist.train", "")
        experiment = arguments.experiment
        if arguments.output:
            experiment = RunFolder(arguments.output, experiment, arguments.resume).experiment
        axes = experiment.parallel.axes(DEVICES)
        experiment.check_mesh(axes)
        for check in checks:
            check(experiment, axes)
    except ConfigError as error:
        return str(error)
    return ""


def ways(message: str) -> Iterator[Line]:
    """Settings of each fix in a message's first line; a field to leave out has no value."""
    problem, _, fix = message.splitlines()[0].rpartition("; ")
    if " should be " in fix:  # for pydantic the message itself gives the fix
        problem, fix = message.split(": ")[-2:]
    subject = next((m[1] for m in ASSIGNED.finditer(problem or message)), "")
    if limit := re.search(r"should be (greater|less) than (or equal to )?(\d+)$", fix):
        yield {subject: str(int(limit[3]) - (limit[1] == "less"))}
        return
    field = subject
    for way in re.split(r",? or ", fix):
        if way.endswith("jaxdist.train"):  # another program
            continue
        if found := {SHORTCUTS.get(name, name): value for name, value in ASSIGNED.findall(way)}:
            *_, field = found
            yield found
        elif named := re.search(r"leave (?:it|\S+) out$", way):
            yield {subject if "leave it" in named[0] else SHORTCUTS.get(named[0].split()[1], field): ""}
        elif chosen := re.search(r"(?:^|use |at most |as |')([\w,.=-]+)'?$", way):
            yield {field: chosen[1] if re.search(r"[a-z]", chosen[1]) else chosen[1].replace(",", "")}


def advice(*files: Path) -> set[str]:
    """Patterns of the fixes in the modules' ConfigErrors: the text after the last semicolon."""
    calls = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    found = set()
    for call in calls:
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "ConfigError" and call.args:
            parts = call.args[0].values if isinstance(call.args[0], ast.JoinedStr) else call.args[:1]
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in parts)
            if "; " in text:
                found.add(".*".join(map(re.escape, text.rpartition("; ")[2].split(VALUE))))
    return found


def test_a_fix_that_is_given_is_found(tmp_path: Path) -> None:
    (file := tmp_path / "module.py").write_text('raise ConfigError(f"{x} = {y}; no; give {z} (or" " none)")\n')
    (pattern,) = advice(file)
    assert re.fullmatch(pattern, "give 4 (or none)") and not re.fullmatch(pattern, "give 4 or none")


def followed(line: Line, *checks: Checks) -> int:
    """Number of fixes, one after another, until the line is accepted; each of several is tried first."""
    message, steps = refusal(line, *checks), 0
    assert message
    firsts = list(ways(message))
    assert firsts, f"no fix that can be followed: {message}"
    for first in firsts:
        current, messages, way = line, [message], first
        while messages[-1]:
            assert len(messages) <= ROUNDS, messages
            current = {name: value for name, value in (current | way).items() if value}
            messages.append(refusal(current, *checks))
            assert messages[-1] not in messages[:-1], f"following {way} led to the same: {messages[-1]}"
            way = next(ways(messages[-1]), {}) if messages[-1] else {}
            assert way or not messages[-1], f"no fix that can be followed: {messages[-1]}"
        steps = max(steps, len(messages) - 1)
    return steps


@pytest.mark.parametrize("argv", [*BAD_VALUES, *FURTHER], ids=" ".join)
def test_each_fix_is_followed_until_it_works(argv: list[str]) -> None:
    assert followed(line_of(argv)) >= 1


# field -> values, some of which do not go together, by family; a mesh of one to three axes is drawn too
SIZES: dict[str, dict[str, str]] = {
    "llama": {
        "model.heads": "1 3 4 6 12",
        "model.kv_heads": "1 2 3 4",
        "model.qkv_bias": "true",
        "model.qk_norm": "true",
    },
    "mixtral": {"model.heads": "2 4 6", "model.kv_heads": "1 2", "model.experts": "3 4 8", "model.hidden": "24 100"},
    "qwen3_moe": {"model.heads": "4 6", "model.experts": "3 8", "model.qk_norm": "true", "model.head_dim": "2 6 16"},
    "gpt2": {"model.heads": "1 3 4 5 8 12", "model.dim": "24 30 64 128"},
    "resnet": {"model.depths": "1,1", "model.widths": "64,128 30,64 48,96", "model.block": "basic bottleneck"},
}
DECODERS = {
    "model.hidden": "100 384",
    "model.vocab": "256 257",
    "model.layers": "2 3 4 8",
    "data.sequence": "64 96 100",
}
ALL = {
    "train.batch": "4 6 9 16", "train.accumulation": "1 2 3 4", "parallel.strategy": "fsdp zero1 ddp",
    "parallel.sequence": "false true", "parallel.context": "ring ulysses", "memory.remat_every": "1 2 3",
    "parallel.pipeline_schedule": "1F1B GPipe Interleaved1F1B", "memory.loss_chunks": "1 4 1000",
    "memory.offload": "optimizer optimizer,parameters",
}  # fmt: skip


def drawn(family: str, seed: int) -> Line:
    """A model and a mesh; most do not fit."""
    random = Random(seed)
    fields = SIZES[family] | ALL | ({} if family == "resnet" else DECODERS)
    line = {name: random.choice(values.split()) for name, values in fields.items() if random.random() < 0.5}
    axes = random.sample(AXES, random.choice([1, 1, 2, 3]))
    return line | {"model.family": family, "parallel.mesh": ",".join(f"{a}={random.randint(2, 6)}" for a in axes)}


@pytest.mark.long
@pytest.mark.parametrize("family", SIZES)
def test_no_fix_leads_in_a_circle(family: str) -> None:
    """Sizes that a mesh divides must also fit each other, as GPT-2's heads and width."""
    refused = [line for seed in range(40) if refusal(line := drawn(family, seed))]
    assert len(refused) > 20
    for line in refused:
        assert followed(line) >= 1


def on_given_weights(line: Line, path: Path, option: str) -> Line:
    """The line with its model, and for --resume all but its layout, moved to files at `path`; empty if they do not
    fit."""
    kept = ("model.", "train.", "data.") if option == "resume" else ("model.",)
    own = {name: value for name, value in line.items() if name.startswith(kept)}
    short = {} if option == "resume" else {"data.sequence": "1"}  # weights do not depend on the data
    if refusal(own | short):
        return {}
    experiment = parse(argv_of(own | short), "jaxdist.train", "").experiment
    if option == "resume":
        RunFolder(path, experiment.on_data("f" * 32)).create(experiment.on_data("f" * 32))
    else:
        path.mkdir()
        (path / EXPERIMENT).write_text(experiment.model_dump_json(exclude_none=True))
    return {option: str(path)} | {name: value for name, value in line.items() if name not in own}


@pytest.mark.long
@pytest.mark.parametrize("option", ["init", "resume"])
@pytest.mark.parametrize("family", SIZES)
def test_no_fix_asks_for_another_model_than_that_of_the_weights(family: str, option: str, tmp_path: Path) -> None:
    lines = [on_given_weights(drawn(family, seed), tmp_path / str(seed), option) for seed in range(30)]
    refused = [line for line in lines if line and refusal(line)]
    assert len(refused) > 8
    for line in refused:
        assert followed(line) >= 1


@pytest.mark.parametrize(
    ("option", "argv", "fix"),
    [
        ("resume", ["--train.batch", "6", "--mesh", "pipeline=3,fsdp=4"], {"parallel.mesh": "pipeline=2,fsdp=2"}),
        ("resume", ["--model.vocab", "250", "--mesh", "tensor=4"], {"parallel.mesh": "tensor=2"}),
        ("init", ["--model.vocab", "250", "--mesh", "tensor=4"], {"model.vocab_multiple": "4"}),
        ("init", [*GPT2, "--model.positions", "100", "--data.sequence", "100", "--mesh", "tensor=3,context=8"],
            {"parallel.mesh": "context=2,tensor=2"}),
        ("init", [*GPT2, "--model.positions", "100", "--data.sequence", "128"], {"data.sequence": "100"}),
        ("resume", [*RESNET, "--mesh", "fsdp=3"], {"parallel.mesh": "fsdp=2"}),
    ],
    ids=str,
)  # fmt: skip
def test_the_fix_beside_given_weights(option: str, argv: list[str], fix: Line, tmp_path: Path) -> None:
    line = on_given_weights(line_of(argv), tmp_path / "weights", option)
    assert list(ways(refusal(line))) == [fix]
    assert followed(line) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.heads", "6"],
        ["--model.heads", "5", "--model.kv_heads", "2"],
        ["--model.kv_heads", "3", "--mesh", "tensor=3"],
        ["--model.family", "gpt2", "--model.heads", "7"],
    ],
    ids=" ".join,
)
def test_flags_of_another_model_than_that_of_the_weights_are_left_out(argv: list[str], tmp_path: Path) -> None:
    line = on_given_weights({}, tmp_path / "weights", "init") | line_of(argv)
    message = refusal(line)
    model = [flag for flag in argv if flag.startswith("--model.")]
    assert message.endswith(f"; leave out {' '.join(model)}: --init gives the model")


@pytest.mark.parametrize(
    "argv",
    [
        ["--mesh", "tensor=3", *GPT2, "--model.heads", "4"],
        ["--mesh", "tensor=5", *GPT2],
        ["--mesh", "fsdp=6,tensor=3", "--model.heads", "4", "--model.qkv_bias", "true"],
        ["--mesh", "expert=3,fsdp=2", *MIXED, "--train.batch", "9"],
        ["--mesh", "context=3,tensor=2", *ULYSSES, "--data.sequence", "100"],
    ],
    ids=" ".join,
)
def test_a_fix_names_all_that_it_asks_for(argv: list[str]) -> None:
    assert followed(line_of(argv)) == 1


def test_changed_words_are_found() -> None:
    line = line_of(["--mesh", "1x3"])
    together = {"model.heads": "12", "model.kv_heads": "6", "model.vocab_multiple": "3"}
    assert list(ways(refusal(line))) == [{"parallel.mesh": "tensor=2"}, together]
    assert not list(ways("model.heads = 8 cannot be divided; change the mesh"))
    for message in ("model.heads = 8; use model.heads = 5", "model.heads = 8; use model.haeds = 9"):
        (way,) = ways(message)
        assert refusal(line | way)
