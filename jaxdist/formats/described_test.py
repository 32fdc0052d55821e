"""Models without a TOML file: from `--config` with a Hugging Face folder or a run, or from `--init` alone."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from jaxdist import plan
from jaxdist.command_line.arguments import load, parse
from jaxdist.config import ConfigError, Experiment, Model, check_shapes
from jaxdist.formats.described import folder_of, source_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 300,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "tie_word_embeddings": True,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 3,
    "n_embd": 24,
    "n_head": 2,
    "vocab_size": 99,
    "n_positions": 32,
}
RESNET: dict[str, Any] = {"model_type": "resnet", "depths": [1, 2], "hidden_sizes": [32, 64], "embedding_size": 16}
FOLDERS = {"llama": LLAMA, "gpt2": GPT2, "resnet": RESNET}


def folder(path: Path, settings: dict[str, Any], tokenizer: bool = True) -> Path:
    """A Hugging Face folder whose weights are not read here."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    return path


def experiment_of(*argv: str | Path) -> Experiment:
    return parse(list(map(str, argv)), "test", "").experiment


@pytest.fixture(params=["orbax", "torch_ref"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run folder of either backend, as far as needed to read its config."""
    experiment = load(folder(tmp_path / "of run", LLAMA), {"optimizer.learning_rate": "0.5"})
    name = {"orbax": "experiment/metadata", "torch_ref": "experiment.json"}[request.param]
    file = tmp_path / "run/checkpoints/3" / name
    file.parent.mkdir(parents=True)
    file.write_text(experiment.model_dump_json())
    (tmp_path / "run/config.toml").write_text(experiment.to_toml())
    return tmp_path / "run"


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("option", ["--config", "--init"])
@pytest.mark.parametrize("file", ["", "config.json"])
def test_a_folder_gives_the_model(name: str, option: str, file: str, tmp_path: Path) -> None:
    """It also gives its tokenizer and a fitting sequence length; images have no tokenizer."""
    path = folder(tmp_path / "hf", FOLDERS[name])
    e = experiment_of(option, path / file)
    assert e.model == source_of(path).model and e.model.family == name  # type: ignore[union-attr]
    assert e.data.tokenizer == ("bytes" if name == "resnet" else str(path / "tokenizer.json"))
    assert e.data.sequence == {"llama": 64, "gpt2": 32, "resnet": 128}[name]
    assert (
        experiment_of(option, path / file, "--data.tokenizer", "bytes", "--data.sequence", "16").data.tokenizer
        == "bytes"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])
def test_a_weights_file_means_its_folder(name: str, tmp_path: Path) -> None:
    """A file beside other weights, or outside of a folder, stands for itself."""
    path = folder(tmp_path / "hf", LLAMA)
    (path / name).write_text("weights")
    parsed = parse(["--init", str(path / name)], "test", "")
    assert parsed.init == path and parsed.experiment.model.layers == 6
    (path / "model.safetensors").write_text("weights")
    (path / "adapter.bin").write_text("weights")
    assert folder_of(path / "pytorch_model.bin") == path / "pytorch_model.bin"
    assert folder_of(path / "adapter.bin") == path / "adapter.bin"
    (path / "config.json").unlink()
    assert folder_of(path / name) == path / name


@pytest.mark.parametrize("options", [["--config"], ["--init"], ["--config", "--init"]])
def test_notes_on_a_folder_are_printed_once(options: list[str], tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", GPT2, tokenizer=False)
    (path / "merges.txt").write_text("")
    dropout, tokenizer = parse([text for o in options for text in (o, str(path))], "test", "").notes
    assert "resid_pdrop = 0.1" in dropout and dropout.endswith("jaxdist trains without dropout")
    assert tokenizer == f"{path}: merges.txt is not read; without data.tokenizer, text is read as bytes"
    (path / "tokenizer.json").write_text("{}")
    assert len(parse([options[0], str(path)], "test", "").notes) == 1


def test_a_relative_folder_gives_an_absolute_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "hf", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert experiment_of("--init", "hf").data.tokenizer == str(tmp_path / "hf/tokenizer.json")
    folder(tmp_path / "without", LLAMA, tokenizer=False)
    assert experiment_of("--config", "without").data.tokenizer == "bytes"


def test_fields_of_a_folder_used_as_config_can_be_changed(tmp_path: Path) -> None:
    """No weights are loaded, so this is a new model of another size."""
    assert experiment_of("--config", folder(tmp_path / "hf", LLAMA), "--model.layers", "2").model.layers == 2


def test_a_run_gives_its_model_by_init_and_all_of_its_config_by_config(run: Path) -> None:
    right = load(run / "config.toml", {})
    for path in (run, run / "checkpoints/3"):
        e = experiment_of("--init", path)
        assert e.model == right.model and e.data.tokenizer == right.data.tokenizer
        assert e.optimizer.learning_rate == Experiment().optimizer.learning_rate
    assert experiment_of("--config", run) == right


def test_sections_of_a_config_without_a_model_are_kept(tmp_path: Path) -> None:
    path, file = folder(tmp_path / "hf", LLAMA), tmp_path / "x.toml"
    file.write_text('[data]\nsequence = 20\ntokenizer = "bytes"\n[train]\nsteps = 7\n')
    e = experiment_of("--config", file, "--init", path, "--seed", "3")
    assert (e.model.layers, e.data.sequence, e.data.tokenizer, e.train.steps, e.train.seed) == (6, 20, "bytes", 7, 3)


def refused(*argv: str | Path) -> str:
    with pytest.raises(ConfigError) as error:
        experiment_of(*argv)
    return str(error.value)


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (LLAMA, {"model.layers": "4", "model.dim": "64"}),
        (LLAMA, {"model.tied": "false", "model.rope_theta": "1e4", "model.kv_heads": "2"}),
        (LLAMA, {"model.family": "gpt2", "model.layers": "3"}),
        (GPT2, {"model.positions": "64"}),  # learned positions: the weights have that many
        (RESNET, {"model.depths": "1,3", "model.classes": "5"}),
    ],
)
def test_a_flag_that_contradicts_the_weights_is_refused(
    settings: dict[str, Any], flags: dict[str, str], tmp_path: Path
) -> None:
    """All such flags at once; following the message's fix literally works."""
    path = folder(tmp_path / "hf", settings)
    line = [text for name, value in flags.items() for text in (f"--{name}", value)]
    message = refused("--init", path, *line)
    out = re.search(r"holds another model, with .*; leave out (.*): --init gives the model", message)
    assert out, message
    left = [text for name, value in flags.items() if f"--{name}" not in out[1].split() for text in (f"--{name}", value)]
    assert experiment_of("--init", path, *left).model.family == settings["model_type"] and len(left) < len(line)


def test_flags_that_agree_or_are_no_property_of_weights_pass(tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", LLAMA)
    e = experiment_of("--init", path, "--model.layers", "6", "--model.positions", "4096", "--model.init_std", "0.1")
    model: Any = e.model
    assert (model.layers, model.positions, model.init_std) == (6, 4096, 0.1)


def test_a_config_of_another_model_lists_all_differences_at_once(tmp_path: Path) -> None:
    """Following its flags literally gives the weights' model."""
    path = folder(tmp_path / "hf", LLAMA)
    line: list[str | Path] = ["--config", "default", "--init", path, "--data.sequence", "64"]
    message, model = refused(*line), load(path, {}).model
    names = {"layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "vocab", "norm_eps", "rope_theta", "tied"}
    assert set(re.findall(r"model\.(\w+) = ", message)) == names
    fix = message.partition("; give ")[2]
    assert experiment_of(*line, *shlex.split(fix)).model.model_dump() | {"positions": 64} == model.model_dump()


def test_a_config_of_another_family_is_to_be_left_out(tmp_path: Path) -> None:
    path = folder(tmp_path / "hf", GPT2)
    message = refused("--config", "default", "--init", path)
    assert "model.family = 'llama', " in message and "; leave out --config default and every --model flag" in message
    assert experiment_of("--init", path).model.family == "gpt2"


@pytest.mark.parametrize("config", ["llama-1b", "folder", "default"])
def test_another_family_than_that_of_the_config(config: str, tmp_path: Path) -> None:
    """One message with the cause instead of one for each field that the other family lacks."""
    name = str(folder(tmp_path / "hf", LLAMA)) if config == "folder" else config
    message = refused("--config", name, "--model.family", "gpt2", "--seed", "1")
    assert message.startswith(f"model.family = 'gpt2', but --config {name} holds another model, with 'llama'")
    out = message.partition("leave out ")[2].partition(":")[0]
    assert out == "--model.family" and experiment_of("--config", name, "--seed", "1").model.family == "llama"
    (tmp_path / "both.toml").write_text("[model]\nlayers = 3\ndim = 32\nheads = 4\n")
    assert experiment_of("--config", tmp_path / "both.toml", "--model.family", "gpt2").model.family == "gpt2"


def test_resuming_another_folder_than_a_run_names_a_fix(run: Path, tmp_path: Path) -> None:
    for path in (run / "checkpoints/3", run / "config.toml"):
        message = refused("--resume", path)
        assert f"it belongs to the run {run}: give --resume {run}, which continues" in message
    assert parse(["--resume", str(run)], "test", "").resume
    hf = folder(tmp_path / "hf", LLAMA)
    assert refused("--resume", hf).endswith(f"to begin with it, give --init {hf} and a new --output")
    assert experiment_of("--init", hf, "--output", tmp_path / "new").model.layers == 6
    file = tmp_path / "x.toml"
    file.write_text("")
    assert f"give --config {file}" in refused("--resume", file)
    assert refused("--resume", tmp_path / "no").endswith(
        f"begin one by --output {tmp_path / 'no'}, or give the folder of a run"
    )


def test_weights_of_another_model_than_that_of_the_run(run: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "hf", LLAMA | {"num_hidden_layers": 2})
    message = refused("--resume", run, "--init", other)
    assert message.endswith(f"; leave out --init {other}: the run continues with its own weights")
    assert experiment_of("--resume", run).model.layers == 6


def test_a_damaged_checkpoint_is_left_to_who_reads_its_weights(run: Path) -> None:
    for file in (run / "checkpoints/3").rglob("*"):
        if file.is_file():
            file.write_text("{")
    assert source_of(run) is None


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "has neither config.json nor config.toml" in refused("--config", tmp_path)
    assert "num_hidden_layers is missing" in refused("--config", folder(tmp_path / "hf", {"model_type": "llama"}))


def test_the_plan_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main(["--config", str(folder(tmp_path / "hf", LLAMA)), "--mesh", "1x1", "--json"])
    model: Model = load(tmp_path / "hf", {}).model
    found = json.loads(capsys.readouterr().out)
    assert model.layers == 6 and found


def test_weights_that_do_not_name_their_model_ask_for_a_config(tmp_path: Path) -> None:
    """The message blames a requested model, but not the default one."""
    file, config = tmp_path / "ckpt.pt", tmp_path / "c.toml"
    file.write_bytes(b"weights")
    config.write_text("[model]\nlayers = 3\n")

    def message(*line: str) -> str:
        with pytest.raises(ConfigError) as error, parse(["--init", str(file), *line], "test", "").reading_weights():
            check_shapes(str(file), {"lm_head": (256, 48)}, {"lm_head": (256, 128)})
        return str(error.value)

    refusal = message()
    assert refusal.startswith(f"--init {file}: the file does not say what model it is, and does not fit the default")
    assert refusal.endswith("in the model); give its config, as --config PATH|NAME with its [model] section")
    for line in (["--config", str(config)], ["--config", "default"], ["--model.layers", "3"]):
        assert message(*line).endswith("; give weights that belong to their config")
