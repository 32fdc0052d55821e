"""The experiment and its command line: accepted and refused input, and the messages."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from jaxdist.command_line.arguments import fields, find_config, load, parse
from jaxdist.config import POLICIES, ConfigError, Experiment, TrainingError, check_finite, exit_codes
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.formats.hf import read_model
from jaxdist.runs.display import show_end

SHIPPED = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.toml"))


def experiment(*argv: str) -> Experiment:
    return parse(argv, "jaxdist.train", "").experiment


def test_defaults_are_the_shipped_default() -> None:
    assert load("default", {}) == Experiment()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_say_how_to_run_them(path: Path) -> None:
    assert load(path.stem, {}) == load(str(path), {})
    head = path.read_text(encoding="utf-8").split("\n[")[0]
    for word in ("Command:", "Hardware:", "Time:", "Expect:"):
        assert word in head, f"{path.name} does not state its {word}"
    assert f"--config {path.stem}" in head or path.stem == "default"


def test_resolved_config_is_accepted_back(tmp_path: Path) -> None:
    original = experiment("--mesh", "2x4", "--precision", "bf16", "--model.qk_norm", "true", "--data.path", 'a "b"\\c')
    file = tmp_path / "config.toml"
    file.write_text(original.to_toml(), encoding="utf-8")
    assert experiment("--config", str(file)) == original
    assert experiment("--config", str(file), "--precision", "fp64").precision.compute == "float64"


def test_every_field_has_help_and_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (table, _, _) in fields().items():
        description = table.docstrings().get(name.partition(".")[2], "")
        assert description.endswith((".", ")")), f"{name} has no docstring"
    with pytest.raises(SystemExit):
        parse(["--help"], "jaxdist.train", "")
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in fields())


def test_policies_resolve() -> None:
    for policy, (parameters, compute, reduce) in POLICIES.items():
        p = experiment("--precision", policy).precision
        assert (p.parameters, p.compute, p.reduce) == (parameters, compute, reduce)
    assert experiment("--precision", "bf16", "--precision.reduce", "bfloat16").precision.reduce == "bfloat16"


@pytest.mark.parametrize(
    ("name", "policy", "dtypes", "scale"),
    [
        ("32-true", "fp32", ("float32", "float32", "float32"), 0),
        ("64-true", "fp64", ("float64", "float64", "float64"), 0),
        ("bf16-mixed", "bf16", ("float32", "bfloat16", "float32"), 0),
        ("16-mixed", "fp16", ("float32", "float16", "float32"), 65536),
        ("O0", "fp32", ("float32", "float32", "float32"), 0),
        ("O1", "fp16", ("float32", "float16", "float32"), 65536),
        ("O2", "O2", ("float32", "float16", "float16"), 65536),
        ("O3", "16-true", ("float16", "float16", "float16"), 0),
        ("bf16-true", "bf16-true", ("bfloat16", "bfloat16", "bfloat16"), 0),
    ],
)
def test_precision_names_of_others(name: str, policy: str, dtypes: tuple[str, str, str], scale: float) -> None:
    """Names of Lightning and Apex map to policies; some of them scale the loss."""
    p = experiment("--precision", name).precision
    assert (p.policy, (p.parameters, p.compute, p.reduce), p.loss_scale) == (policy, dtypes, scale)


def test_another_policy_has_its_own_loss_scale(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(experiment("--precision", "fp16").to_toml(), encoding="utf-8")
    assert experiment("--config", str(file)).precision.loss_scale == 65536
    assert experiment("--config", str(file), "--precision", "bf16").precision.loss_scale == 0
    assert experiment("--config", str(file), "--precision.loss_scale", "128").precision.loss_scale == 128


@pytest.mark.parametrize(
    ("mesh", "strategy", "sizes"),
    [
        ("1x1", "fsdp", (1, 1, 1)),
        ("8", "fsdp", (1, 8, 1)),
        ("2x4", "fsdp", (1, 2, 4)),
        ("2x4", "zero1", (1, 2, 4)),
        ("2x4", "ddp", (2, 1, 4)),
        ("data=2,fsdp=2,tensor=2", "fsdp", (2, 2, 2)),
        ("tensor=2, fsdp=4", "zero2", (1, 4, 2)),
        ("fsdp=-1,tensor=2", "fsdp", (1, 8, 2)),
        ("-1x4", "ddp", (4, 1, 4)),
        ("-1", "fsdp", (1, 16, 1)),
    ],
)
def test_mesh(mesh: str, strategy: str, sizes: tuple[int, ...]) -> None:
    parallel = experiment("--mesh", mesh, "--strategy", strategy).parallel
    assert parallel.axes(16) == {"pipeline": 1, "expert": 1, "context": 1} | dict(
        zip(("data", "fsdp", "tensor"), sizes, strict=True)
    )


MIXED = ["--model.family", "mixtral"]
INTERLEAVED = ["--parallel.pipeline_schedule", "interleaved_1f1b", "--parallel.virtual_stages", "2"]
BAD: list[tuple[list[str], str]] = [
    (["--model.layrs", "3"], r"'--model.layrs'; did you mean '--model.layers'"),
    (["--model.layers", "three"], r"model.layers = 'three': .*integer"),
    (["--model.layers", "0"], r"model.layers = '0': .*greater than or equal to 1"),
    (["--strategy", "fsdp2"], r"parallel.strategy = 'fsdp2': .*'ddp', 'zero1', 'zero2' or 'fsdp'"),
    (["--precision", "fp8"], r"^arguments: precision.policy = 'fp8': .*'fp32', 'bf16', 'fp16', .*"),
    (["--precision.compute", "float64"], r"float64 is for proofs .* --precision fp64"),
    (["--mesh", "2x4x2"], r"parallel.mesh = '2x4x2': name the axes"),
    (["--mesh", "2xfour"], r"size 'four' of axis 'tensor'"),
    (["--mesh", "fsdp=2,fsdp=4"], r"axis 'fsdp' is given twice"),
    (["--mesh", "fsdp=2,tenser=4"], r"unknown axis 'tenser'; did you mean 'tensor'"),
    (["--mesh", "fsdp=-1,tensor=-1"], r"only one axis can be -1"),
    (["--mesh", "fsdp=-1,tensor=3"], r"16 devices are not a multiple of 3"),
    (["--mesh", "fsdp=4", "--strategy", "ddp"], r"ddp shards nothing; name the axis data"),
    (["--mesh", "data=4,tensor=2"], r"shards over the axis fsdp, which has size 1"),
    (
        ["--mesh", "1x4", "--parallel.sequence", "true", "--data.sequence", "34"],
        r"data.sequence = 34 cannot be divided over the mesh axis tensor = 4, which splits it under parallel.sequence",
    ),
    (
        ["--mesh", "context=4", "--data.sequence", "60"],
        r"data.sequence = 60 cannot be divided over the mesh axis context = 4, which splits it in 2 chunks each under "
        r"parallel.context = ring; use --mesh .*, or a multiple of 8",
    ),
    (
        [
            "--mesh",
            "context=4,tensor=2",
            "--parallel.sequence",
            "true",
            "--data.sequence",
            "60",
            "--parallel.context",
            "ulysses",
        ],
        r"data.sequence = 60 .* axis context × tensor = 8, .* under parallel.sequence; .* a multiple of 8",
    ),
    (
        ["--mesh", "context=4,tensor=2", "--parallel.context", "ulysses"],
        r"model.kv_heads = 4 cannot be divided over the mesh axis tensor × context = 8",
    ),
    (["--mesh", "context=4", "--model.dim", "62"], r"model.dim = 62 .* mesh axis context = 4"),
    (["--mesh", "1x3"], r"model.heads = 8 cannot be divided over the mesh axis tensor = 3"),
    (["--mesh", "1x8"], r"model.kv_heads = 4 cannot be divided over the mesh axis tensor = 8"),
    (
        ["--mesh", "1x4", "--model.vocab", "255"],
        r"model.vocab = 255 cannot be divided over the mesh axis tensor = 4",
    ),
    (["--mesh", "16x1", "--model.dim", "24"], r"model.dim = 24 .* mesh axis fsdp = 16, which splits parameter embed"),
    (["--mesh", "16x1", "--model.qk_norm", "true", "--model.head_dim", "8"], r"model.head_dim = 8 .* fsdp = 16"),
    (
        ["--mesh", "4x4", "--model.qkv_bias", "true", "--model.head_dim", "2"],
        r"model.kv_heads × head_dim = 8 .* tensor × fsdp = 16, which splits parameter layers.attention.k_proj.bias",
    ),
    (["--mesh", "4x2", "--model.mlp_bias", "true", "--model.hidden", "20"], r"model.hidden = 20 .* tensor × fsdp = 8"),
    (["--mesh", "3x1"], r"train.batch = 16 sequences cannot be divided over data × fsdp = 3"),
    (
        ["--mesh", "pipeline=3"],
        r"model.layers = 4 .* axis pipeline = 3; use --mesh pipeline=2, or a multiple of 3, as model.layers = 6",
    ),
    (
        ["--mesh", "pipeline=8"],
        r"model.layers = 4 .* axis pipeline = 8; use --mesh pipeline=4, or a multiple of 8, as model.layers = 8",
    ),
    (
        [*INTERLEAVED, "--mesh", "pipeline=4"],
        r"layers = 4 .* pipeline = 4 × parallel.virtual_stages = 2; use .*, or a multiple of 8, as model.layers = 8",
    ),
    (["--parallel.virtual_stages", "2"], r"virtual_stages = 2 with parallel.pipeline_schedule = 1F1B: .*; use .*Inter"),
    (INTERLEAVED[:2], r"virtual_stages = 1 with .* Interleaved1F1B: .*; use parallel.virtual_stages = 2, or .*1F1B"),
    (["--parallel.pipeline_schedule", "ZBV"], r"parallel.pipeline_schedule = 'ZBV': input should be 'GPipe', '1F1B'"),
    (
        ["--mesh", "pipeline=2", "--memory.remat", "full", "--memory.remat_every", "4"],
        r"memory.remat_every = 4 does not divide the 2 layers of a stage: .*; use memory.remat_every = 2",
    ),
    (
        ["--mesh", "pipeline=2", "--memory.offload", "optimizer,parameters"],
        r"memory.offload = optimizer,parameters with the mesh axis pipeline = 2: parameters .*; use .* = optimizer",
    ),
    (["--mesh", "pipeline=2", "--train.accumulation", "3"], r"train.batch = 16 cannot .* train.accumulation = 3"),
    (["--mesh", "expert=2"], r"axis expert = 2 splits experts, and model.family = llama has none; use --mesh fsdp=2"),
    ([*MIXED, "--mesh", "expert=3"], r"model.experts = 8 .* mesh axis expert = 3; use --mesh expert=2"),
    ([*MIXED, "--mesh", "fsdp=4,expert=8"], r"train.batch = 16 .* over data × fsdp × expert = 32 devices"),
    (["--model.layers", "10001"], r"model.layers = 10001 is absurd; use at most 10,000"),
    ([*MIXED, "--model.experts", "10001"], r"model.experts = 10001 is absurd; use at most 10,000"),
    (
        [*MIXED, "--model.experts", "10000", "--model.layers", "11"],
        r"model.layers = 11 are 110,000 experts, more than 100,000; use at most model.experts = 9090",
    ),
    ([*MIXED, "--model.top_k", "9"], r"model.top_k = 9 is more than model.experts = 8; use at most 8"),
    ([*MIXED, "--mesh", "expert=2,tensor=5"], r"model.heads = 8 cannot be divided over the mesh axis tensor = 5"),
    (["--model.kv_heads", "3"], r"model.kv_heads = 3 does not divide model.heads = 8"),
    (["--data.sequence", "2048"], r"data.sequence = 2048 is longer than model.positions = 1024"),
    (["--train.batch", "5", "--train.accumulation", "2"], r"train.batch = 5 .* train.accumulation = 2"),
    (
        ["--mesh", "4x2", "--memory.loss_chunks", "513"],
        r"memory.loss_chunks = 513 are more than the 512 tokens of a microbatch on a device; use at most 512",
    ),
    (["--memory.remat_every", "3"], r"memory.remat_every = 3 does not divide model.layers = 4; use 1"),
    (["--memory.offload", "weights"], r"memory.offload.0 = 'weights': .* 'optimizer', 'parameters' or 'activations'"),
    (["--memory.offload", "activations"], r"memory.remat = none: .* use memory.remat = selective or full, or leave"),
    (["--model.family", "gpt3"], r"'gpt3'.*'llama', 'gpt2'"),
    (["--model.family", "gpt2", "--model.window", "4"], r"model.window = '4': no such field"),
    (["--config", "defualt"], r"--config defualt: .*did you mean 'default'"),
    (["--config", "missing.toml"], r"--config missing.toml: .*No such file"),
    (["--resume"], r"--resume needs the folder of the run"),
    (["--steps", str(2**31)], r"train.steps = .*less than 2147483648"),
    (["--seed", str(2**32)], r"train.seed = .*less than 4294967296"),
    (["--data.path", "~nobody-of-that-name/x"], r"data.path = '~nobody-of-that-name/x': "),
    (["--init", "nowhere"], r"--init nowhere: no such file"),
    (["--steps"], r"expected one argument"),
    (["--steps", "9", "--epochs", "2"], r"--steps 9 --epochs 2: each says how long; give one"),
]


@pytest.mark.parametrize(("argv", "expected"), BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_bad_input_is_named(argv: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        e = experiment(*argv)
        e.check_mesh(e.parallel.axes(16))
    assert re.search(expected, str(error.value)), str(error.value)


def test_bad_toml(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    for text, message in (
        ("[model]\nlayrs = 3", "model.layrs = 3: no such field; did you mean 'layers'"),
        ("[modell]\nlayers = 3", "modell = .*: no such field; did you mean 'model'"),
        ("[model\n", "x.toml: "),
        ("model = 3", "model = 3: must be a table of fields"),
        ("data = [1]", r"data = \[1\]: must be a table of fields"),
        ("[model]\nlayers = " + "9" * 5000, "x.toml: Exceeds the limit"),
        ("a = " + "[" * 3000 + "]" * 3000, "x.toml: .*recursion"),
        ("[llama]\nlayers = 3", "llama = .*: no such field; choose one of"),
        ("[gpt2]\nlayers = 3", "gpt2 = .*: no such field; choose one of"),
        ("[precision]\npolicy = []", r"precision.policy = \[\]: "),
        ("[model]\nlayers = true", "model.layers = True: must be a number, not true or false"),
        ("[optimizer]\nlearning_rate = true", "optimizer.learning_rate = True: must be a number"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            experiment("--config", str(file))


def test_families_share_their_names() -> None:
    """Fields that both families have are named alike, so code can read either."""
    for name in ("kv_heads", "head_dim"):
        assert hasattr(Llama(), name) and hasattr(GPT2(family="gpt2"), name)


@pytest.mark.parametrize("wrong", [{"rope_scaling": "linear"}, {"architectures": 3}, {"model_type": ["llama"]}])
def test_a_config_json_of_other_kinds_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    right = sizes | {"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 8, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(right))
    assert read_model(tmp_path).dim == 8
    (tmp_path / "config.json").write_text(json.dumps(right | wrong))
    with pytest.raises(ConfigError, match=str(tmp_path / "config.json")):
        read_model(tmp_path)


def test_paths_mean_the_same_files_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = experiment("--data.path", "text.txt", "--data.tokenizer", "t/tokenizer.json").data
    assert (data.path, data.tokenizer) == (str(tmp_path / "text.txt"), str(tmp_path / "t/tokenizer.json"))
    assert (Experiment().data.path, Experiment().data.tokenizer) == ("", "bytes")
    assert experiment("--data.path", "~/text.txt").data.path == str(Path.home() / "text.txt")


@pytest.mark.parametrize("field", ["path", "tokenizer", "end_of_text"])
def test_text_that_no_config_file_can_hold(field: str) -> None:
    """Python reads Latin-1 file names as surrogates, which a config in UTF-8 cannot hold."""
    with pytest.raises(ConfigError, match=rf"x: data\.{field} = 'caf\\udce9': not in UTF-8; rename the file"):
        Experiment.parse({"data": {field: "caf\udce9"}}, source="x")
    named = Experiment.parse({"data": {field: "café"}}, source="x")
    assert Experiment.parse(tomllib.loads(named.to_toml()), source="x") == named


def test_settings_that_an_override_makes_obsolete_are_dropped(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(experiment("--precision", "bf16").on_data("f" * 32).to_toml(), encoding="utf-8")
    assert experiment("--config", str(file)).data.fingerprint == "f" * 32
    assert experiment("--config", str(file), "--data.path", "text.txt").data.fingerprint == ""
    kept = experiment("--config", str(file), "--data.fingerprint", "e", "--data.path", "text.txt")
    assert kept.data.fingerprint == "e"
    # flags in either order
    for argv in (
        ["--precision.reduce", "bfloat16", "--precision", "bf16"],
        ["--precision", "bf16", "--precision.reduce", "bfloat16"],
    ):
        assert experiment("--config", str(file), *argv).precision.reduce == "bfloat16"


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [(ConfigError("wrong"), 2, "error: wrong"), (TrainingError("stopped"), 1, "error: stopped"), (None, 0, "")],
)
@pytest.mark.parametrize("quiet", [False, True])
def test_exit_codes(
    error: Exception | None, code: int, expected: str, quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        if error:
            raise error

    with pytest.raises(SystemExit) as end:
        exit_codes(main, quiet)
    assert end.value.code == code and capsys.readouterr().err.strip() == ("" if quiet else expected)


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    check_finite(3, loss=1.0, grad_norm=0.0)
    for bad in (float("nan"), float("inf")):
        with pytest.raises(TrainingError, match=rf"step 3: grad_norm = {bad}"):
            check_finite(3, loss=1.0, grad_norm=bad)


@pytest.mark.parametrize(("loss", "shown"), [(0.0, "1.00"), (1e4, "inf"), (float("inf"), "inf"), (float("nan"), "nan")])
def test_any_loss_can_be_shown(loss: float, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_end({"validation_loss": loss, "tokens_per_second": None}, [], None)
    assert f"perplexity {shown}," in capsys.readouterr().out


def test_find_config_prefers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").write_text("")
    assert find_config("default") == Path("default")


def test_overrides_win(tmp_path: Path) -> None:
    values: dict[str, Any] = {"model.layers": "7"}
    assert load("default", values).model.layers == 7
