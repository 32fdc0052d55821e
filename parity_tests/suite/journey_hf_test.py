"""A Hugging Face folder and a JSONL file up to an export: config from the folder, training by either side, and
transformers generates from the export."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from jaxdist.convert.__main__ import main as convert
from parity_tests.runs.forkserver import TRAIN
from parity_tests.runs.run import command

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
END, PAD, VOCAB = "<stop>", "<pad>", 280
SIDES = ["jaxdist", "torch_ref"]
SENTENCES = [f"the {who} sat on the {where} and saw {n} birds. " for n, (who, where) in enumerate(
    [("cat", "mat"), ("dog", "log"), ("hen", "hay"), ("fox", "box")] * 6
)]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral in bfloat16, a tokenizer whose end-of-text token has an unusual name, and generation settings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    path = tmp_path_factory.mktemp("hf") / "model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template="{{ messages[0]['content'] }}"
    ).save_pretrained(path)
    config = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=None, eos_token_id=0,
        bos_token_id=None, attention_dropout=0.1, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(config).to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(eos_token_id=[0, 7], pad_token_id=1, max_new_tokens=9)
    model.save_pretrained(path)
    (path / "README.md").write_text("card")
    return path


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    file = folder.parent / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in SENTENCES))
    return file


def train(side: str, *arguments: object) -> str:
    done = command(TRAIN[side], *map(str, (*arguments, "--device", "cpu")))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def companions(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".safetensors"}


def generated(path: Path) -> str:
    """Text generated with the folder's own tokenizer and settings."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer("the cat sat", return_tensors="pt")
    assert model.dtype == torch.bfloat16
    return str(tokenizer.decode(model.generate(**ids)[0]))


@pytest.mark.parametrize("side", SIDES)
def test_an_exported_run_generates_as_the_folder_that_it_began_with(
    side: str, folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 0 gives the same text from the same bits; steps, a resume and another format give other weights."""
    run, line = tmp_path / "run", ["--data.path", data, "--train.batch", 4, "--optimizer.decay", "constant"]
    output = train(side, "--init", folder, "--output", run, "--steps", 0, *line)
    assert f"{folder}/config.json: attention_dropout = 0.1: jaxdist trains without dropout" in output.replace("\n", "")
    convert([str(run), str(tmp_path / "same"), "--to", "hf"])
    assert "attention_dropout = 0.1: jaxdist trains without dropout" in capsys.readouterr().out
    assert companions(tmp_path / "same") == companions(folder)
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "same"))
    assert all(torch.equal(before[name], after[name]) for name in before.keys() | after.keys())
    assert generated(tmp_path / "same") == generated(folder)

    train(side, "--init", folder, "--output", run, "--resume", "--steps", 2, *line)
    convert([str(run), str(tmp_path / "between.pt")])
    convert([str(tmp_path / "between.pt"), str(tmp_path / "out"), "--to", "hf"])
    assert "the weights are written in bfloat16, as those that training began with" in capsys.readouterr().out
    assert companions(tmp_path / "out") == companions(folder)
    assert generated(tmp_path / "out").startswith("the cat sat")
    moved = load_file(tmp_path / "out/model.safetensors")
    assert moved.keys() == before.keys() and any(not torch.equal(before[name], moved[name]) for name in before)


@pytest.mark.slow
def test_a_folder_as_config_gives_its_tokenizer_to_the_export(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New weights and fewer layers: only these change in config.json, and the dtype if asked for."""
    run = tmp_path / "run"
    train("jaxdist", "--config", folder, "--model.layers", 1, "--data.path", data, "--steps", 1, "--output", run)
    convert([str(run), str(tmp_path / "out"), "--dtype", "float32"])
    right: dict[str, Any] = json.loads(companions(folder)["config.json"]) | {"num_hidden_layers": 1, "dtype": "float32"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == right
    found = companions(tmp_path / "out")
    assert {**found, "config.json": b""} == {**companions(folder), "config.json": b""}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == [0, 7] and model.dtype == torch.float32
