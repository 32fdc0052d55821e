"""Names and values of other trainers are answered by ours, which are accepted when the answer is followed."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxdist.command_line.arguments import SHORTCUTS, Parser, add_fields, fields, load, parse
from jaxdist.config import ConfigError, Experiment
from jaxdist.config.aliases import (
    AXIS_NAMES,
    FAMILY,
    FLAG,
    NAMES,
    NOT_HERE_NAMES,
    OFF,
    SECTION_NAMES,
    VALUE_NAMES,
    related_fields,
    value_names,
)
from jaxdist.config.parallel import Parallel

# Model sections for fields that only one family has.
MIXTRAL, GPT2 = {"family": "mixtral", "heads": 16}, {"family": "gpt2", "heads": 16}
MODELS: dict[str, dict[str, Any]] = {
    "model.experts": MIXTRAL, "model.top_k": MIXTRAL, "model.balance": MIXTRAL, "model.capacity": MIXTRAL,
    "model.gelu": GPT2,
}  # fmt: skip
FLAGS = ("config", "output", "init")  # flags without a field; also `resume`, which needs no value
SMALL = ("accumulation", "seed", "experts", "heads", "kv_heads", "layers", "top_k")
FIELDS = fields()


def sample(field: str) -> str:
    """A value that the field accepts."""
    if field in FLAGS:
        return "."
    _, default, shape = FIELDS[field]
    if shape != "VALUE":
        return shape.partition("|")[0]
    if isinstance(default, bool):
        return "true"
    if field.rpartition(".")[2] in SMALL:
        return "4"
    if isinstance(default, float) and default < 1:
        return "0.25"
    return "x" if isinstance(default, str) and field != "parallel.mesh" else "256"


@pytest.fixture(scope="module")
def parser() -> Parser:
    """Parser with the flags of a training command."""
    parser = Parser(allow_abbrev=False)
    for flag in FLAGS:
        parser.add_argument(f"--{flag}", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--resume", action="store_true")
    add_fields(parser)
    return parser


def error_of(function: Callable[..., Any], *inputs: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as error:
        function(*inputs, **named)
    return str(error.value)


def read(parser: Parser, line: list[str], field: str) -> dict[str, Any]:
    """Settings of the command line, accepted as an experiment."""
    values = {name: value for name, value in vars(parser.parse_args(line)).items() if "." in name}
    load(None, {f"model.{n}": v for n, v in MODELS.get(field, {}).items()} | values)
    return values


def test_each_flag_is_named_and_the_named_one_is_accepted(parser: Parser) -> None:
    for name, meaning in NAMES.items():
        value = "2" if meaning.value != "{}" else sample(meaning.field)
        for flag in (f"--{name}", f"--{name.replace('_', '-')}", f"--section.{name}"):
            message = error_of(parser.parse_args, [flag, value])
            found = re.fullmatch(rf"unknown argument {flag!r}; {flag}(?: {value})? is (--.*?) here(?:, .*)?", message)
            assert found, message
            line = found[1].split()
            if len(line) == 1 and line != ["--resume"]:
                line.append(value)
            values = read(parser, line, meaning.field)
            assert list(values) == ([meaning.field] if "." in meaning.field else []), message


def test_each_field_is_named_and_the_named_one_is_accepted() -> None:
    for name, meaning in NAMES.items():
        if "." not in meaning.field:
            continue
        value = "2" if meaning.value != "{}" else sample(meaning.field)
        section, model = meaning.field.partition(".")[0], MODELS.get(meaning.field, {})
        table = {section: {name: value}}
        message = error_of(Experiment.parse, table | ({"model": model | table["model"]} if model else {}), source="x")
        found = re.search(rf"no such field; {name} is (.*?) here(?:, .*)?$", message)
        assert found, message
        values = tomllib.loads(found[1] if " = " in found[1] else f'{found[1]} = "{value}"')
        assert list(values) == [section]
        Experiment.parse(values | ({"model": model | values["model"]} if model else {}), source="x")


def test_unsupported_flags_are_reported(parser: Parser) -> None:
    for name, why in NOT_HERE_NAMES.items():
        for flag in (f"--{name}", f"--section.{name.replace('_', '-')}"):
            assert error_of(parser.parse_args, [flag, "2"]) == f"unknown argument {flag!r}; {why}"
        assert error_of(Experiment.parse, {"train": {name: 2}}, source="x").endswith(f"no such field; {why}")
        assert "leave it out" in why or FLAG.search(why), "what to do about it"
        assert name not in NAMES
        assert {*FLAG.findall(why)} <= {*parser._option_string_actions}


def test_turned_off_flags_are_not_advised_on(parser: Parser) -> None:
    literal = {name: meaning for name, meaning in NAMES.items() if "{}" not in meaning.value}
    for name, meaning in literal.items():
        for no in ("false", "False", "none", "0"):
            message = error_of(parser.parse_args, [f"--{name}", no])
            if meaning.field not in OFF or name == "fp32":
                assert message == f"unknown argument '--{name}'; leave it out"
                continue
            found = re.search(rf"; --{name} {no} is (--.*) here$", message)
            assert found, message
            assert read(parser, found[1].split(), meaning.field) == {meaning.field: OFF[meaning.field]}
    message = error_of(Experiment.parse, {"train": {"torch_compile": False}}, source="x")
    assert message.endswith("torch_compile is train.compile = false here")


def test_each_axis_is_named_and_accepted() -> None:
    for name, ours in AXIS_NAMES.items():
        message = error_of(Parallel(mesh=f"{name.upper()}=2", strategy="ddp").axes, 2)
        assert message.endswith(f"unknown axis {name.upper()!r}; {name.upper()} is {ours} here")
        assert Parallel(mesh=f"{ours}=2", strategy="ddp" if ours != "fsdp" else "fsdp").axes(2)[ours] == 2


@pytest.mark.parametrize("name", [name for name in SECTION_NAMES if name not in Experiment.model_fields])
def test_a_section_is_reported(name: str) -> None:
    message = error_of(Experiment.parse, {name: {"steps": 1}}, source="x")
    assert (
        message.endswith(f"[{name}] is [{SECTION_NAMES[name]}] here") and SECTION_NAMES[name] in Experiment.model_fields
    )


def test_each_value_is_named_and_the_named_one_is_accepted() -> None:
    for field in (*VALUE_NAMES, FAMILY):
        section, _, name = field.partition(".")
        model = MODELS.get(field, {}) if section == "model" else {}
        for theirs, ours in value_names(field).items():
            for spelt in {theirs, theirs.upper(), theirs.replace("_", "-")} - {*FIELDS[field][2].split("|")}:
                message = error_of(Experiment.parse, {section: model | {name: spelt}}, source="x")
                more = related_fields(field).get(theirs)
                assert message.endswith(f"; {spelt!r} is {ours!r} here{f', {more}' if more else ''}"), message
            got = Experiment.parse({section: model | {name: ours}}, source="x")
            assert getattr(getattr(got, section), name) == ours


def test_aliases_name_fields_and_hide_none() -> None:
    """Each key is a field, and no alias hides a name or value of another field."""
    assert {m.field for m in NAMES.values()} <= {*FIELDS, *FLAGS, "resume"}
    assert not NAMES.keys() & {*SHORTCUTS, *FLAGS, "resume", "device"}
    for field in (*VALUE_NAMES, FAMILY):
        assert not value_names(field).keys() & set(FIELDS[field][2].split("|"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--lr", "3e-4"], ["--lr is --optimizer.learning_rate here"]),
        (["--lr=3e-4", "--max_steps", "5"], ["--lr is --optimizer.learning_rate here", "--max_steps is --steps here"]),
        (["--batch-size", "8"], ["--batch-size is --train.batch here, in sequences, over all devices and micro"]),
        (["--zero_stage", "3"], ["--zero_stage 3 is --strategy fsdp here"]),
        (["--sharding_strategy=SHARD_GRAD_OP"], ["--sharding_strategy SHARD_GRAD_OP is --strategy zero2 here"]),
        (["--strategy", "FULL_SHARD"], ["'FULL_SHARD' is 'fsdp' here"]),
        (["--tp", "2"], ["--tp 2 is --mesh tensor=2 here"]),
        (["--parallelism.tensor_parallel_degree", "2"], ["2 is --mesh tensor=2 here"]),
        (["--bf16"], ["--bf16 is --precision bf16 here"]),
        (["--batch", "8"], ["did you mean '--train.batch'?"]),
        (["--weight_decay", "0.1"], ["did you mean '--optimizer.weight_decay'?"]),
        (["--momentum", "0.1"], ["did you mean '--model.momentum' or '--optimizer.momentum'?"]),
        (["--kv-heads", "2"], ["did you mean '--model.kv_heads'?"]),
        (["--optimizer.learnin_rate", "2"], ["did you mean '--optimizer.learning_rate'?"]),
        (["--num-workers", "4", "--betas", "0.9,0.95"], ["no worker processes; leave it out", "beta1 here, the first"]),
        (["--gradient_checkpointing", "False"], ["--gradient_checkpointing False is --memory.remat none here"]),
        (["--optim", "adamw"], ["--optim adamw is --optimizer.name adamw here"]),
        (["--optimizer.name", "AdamW"], ["'AdamW' is 'adamw' here"]),
        (["--data.split", "SHARE"], ["'SHARE' is 'share' here"]),
        (["--fsdp", "full_shard auto_wrap"], ["--fsdp full_shard auto_wrap is --strategy fsdp here"]),
        (["--optimizer.rule", "adam"], ["--optimizer.rule adam is --optimizer.name adam here"]),
        (["--optimizer.amsgrad", "true"], ["Adam is without AMSGrad, which keeps the greatest second moment; leave"]),
        (["--optimizer.fuzz", "1"], ["'--optimizer.fuzz'; see --help"]),
        (["--optimizer.esp", "1"], ["see --help"]),
        (["--train.stps", "1"], ["did you mean '--train.steps'?"]),
        (["--strategy", "HYBRID_SHARD"], ["'HYBRID_SHARD' is 'fsdp' here, with --mesh data=R,fsdp=N for R replicas"]),
        (["--fsdp", "hybrid_shard"], ["is --strategy fsdp here, with --mesh data=R,fsdp=N for R replicas"]),
        (["--model.family", "mistral"], ["model.family = 'mistral': no such family; 'mistral' is 'llama' here, with"]),
        (["--model.family", "LlamaForCausalLM"], ["family; 'LlamaForCausalLM' is 'llama' here"]),
        (["--model.family", "GPT2LMHeadModel"], ["family; 'GPT2LMHeadModel' is 'gpt2' here"]),
        (["--model.family", "phi3"], ["family; choose one of 'llama', 'gpt2', 'mixtral', 'qwen3_moe', 'resnet'"]),
        (["lr=3e-4"], ["unknown argument 'lr=3e-4'; --lr is --optimizer.learning_rate here"]),
        (["--zzz", "3"], ["unknown argument '--zzz'; see --help"]),
        (["stray"], ["unknown argument 'stray'; "]),
    ],
)
def test_answers_to_a_command_line(argv: list[str], expected: list[str]) -> None:
    """All unknown flags at once, one line each."""
    lines = error_of(parse, argv, "jaxdist.train", "").splitlines()
    assert len(lines) == len(expected) and all(text in line for text, line in zip(expected, lines, strict=True)), lines


def test_the_answer_on_replicas_fits_any_number_of_devices() -> None:
    message = error_of(parse, ["--dp_replicate", "4"], "jaxdist.train", "")
    mesh = message.partition("--mesh ")[2].split()[0]

    def sizes(mesh: str, devices: int, *more: str) -> dict[str, int]:
        axes = parse(["--mesh", mesh, *more], "jaxdist.train", "").experiment.parallel.axes(devices)
        return {axis: size for axis, size in axes.items() if size > 1}

    assert sizes(mesh, 8) == {"data": 4, "fsdp": 2} and sizes(mesh, 16) == {"data": 4, "fsdp": 4}
    assert "if none are, leave it out and add --strategy ddp" in message
    assert sizes(mesh.partition(",")[0], 4, "--strategy", "ddp") == {"data": 4}


def test_a_name_that_is_accepted_is_left_alone(tmp_path: Path) -> None:
    for policy in ("bf16-mixed", "32-true"):
        parse(["--precision", policy, "--output", str(tmp_path / "run")], "jaxdist.train", "")


def test_a_command_shows_its_own_flags_alone() -> None:
    parser = Parser()
    parser.add_argument("--batch")
    assert "--bs is --batch here" in error_of(parser.parse_args, ["--bs", "8"])
    assert "learning_rate" not in error_of(parser.parse_args, ["--lr", "8"])
    assert "--config" not in error_of(parser.parse_args, ["--model", "gpt2"])
