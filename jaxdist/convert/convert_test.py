"""Weights convert both ways to the bit; bad input is named and leaves nothing behind."""

import functools
import json
import math
import operator
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError, Model, TrainingError
from jaxdist.convert import experiment_for, read_hf, stream, write_hf
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import in_memory
from jaxdist.convert.entries import shapes_of
from jaxdist.convert.kinds import orbax_files, safetensors_writer
from jaxdist.convert.stream import Conversion
from jaxdist.families.gpt2.config import GPT2
from jaxdist.families.llama.config import Llama
from jaxdist.families.mixtral.config import Mixture
from jaxdist.formats import buffers
from jaxdist.formats.finite import is_square
from jaxdist.formats.hf import to_settings
from jaxdist.formats.orbax import read_experiment
from jaxdist.formats.tables import HUGGINGFACE, LAYERS, table_of
from jaxdist.training import checkpoint

pytestmark = pytest.mark.long

SMALL: dict[str, Any] = {
    "layers": 3, "dim": 8, "heads": 4, "kv_heads": 2, "head_dim": 6, "hidden": 10, "vocab": 7,
    "positions": 12, "norm_eps": 1e-6, "init_std": 0.03, "rope_theta": 500.0,
}  # fmt: skip
SMALL_GPT2: dict[str, Any] = {
    "family": "gpt2", "layers": 3, "dim": 6, "heads": 3, "hidden": 10, "vocab": 7, "positions": 12,
}  # fmt: skip
LLAMA3: dict[str, Any] = {"rope_scaling": "llama3", "rope_factor": 2.0, "rope_original_positions": 5}
MODELS: dict[str, Model] = {
    "LlamaForCausalLM": Llama(**SMALL, **LLAMA3),
    "LlamaForCausalLM biases": Llama(**SMALL, qkv_bias=True, output_bias=True, mlp_bias=True, tied=True),
    "MistralForCausalLM": Llama(**SMALL, window=5),
    # transformers refuses a Llama whose heads do not divide its width; Mistral without a window is the same
    "MistralForCausalLM no window": Llama(**{**SMALL, "dim": 6}),
    "Qwen2ForCausalLM": Llama(**SMALL, qkv_bias=True, tied=True),
    "Qwen2ForCausalLM window": Llama(**SMALL, qkv_bias=True, window=3, **LLAMA3),
    "Qwen3ForCausalLM": Llama(**SMALL, qk_norm=True, tied=True),
    "Qwen3ForCausalLM biases window": Llama(**SMALL, qk_norm=True, qkv_bias=True, output_bias=True, window=3),
    "MixtralForCausalLM": Mixture(**SMALL, family="mixtral", experts=5, window=5),
    "Qwen3MoeForCausalLM": Mixture(**SMALL, family="qwen3_moe", experts=4, top_k=3, norm_topk_prob=False, qk_norm=True),
    "GPT2LMHeadModel": GPT2(**SMALL_GPT2),
    "GPT2LMHeadModel untied exact": GPT2(**SMALL_GPT2, tied=False, gelu="exact"),
}  # fmt: skip


def draw(model: Model, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    drawn = {name: random.normal(size=shape).astype(dtype) for name, shape in shapes_of(model).items()}
    return {name: np.abs(array) if is_square(name) else array for name, array in drawn.items()}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Same names, shapes, dtypes and bytes."""
    return a.keys() == b.keys() and all(
        a[n].shape == b[n].shape and a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a
    )


def saved(path: Path, model: Model, parameters: dict[str, np.ndarray] | None = None) -> Path:
    """A Hugging Face folder."""
    path.mkdir()
    write_hf(path, model, parameters or draw(model))
    return path


def run_of(path: Path, model: Model) -> Path:
    """A run folder with random weights."""
    content = in_memory(experiment_for(model.model_dump(), "test"), draw(model))
    orbax_files.write(path, Conversion(content, LAYERS))
    return path


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
    @pytest.mark.parametrize("name", MODELS)
    def test_ours_to_theirs_and_back(self, name: str, dtype: Any, tmp_path: Path) -> None:
        model, parameters = MODELS[name], draw(MODELS[name], dtype)
        settings = json.loads((saved(tmp_path / "hf", model, parameters) / "config.json").read_text())
        assert settings["architectures"] == [name.split()[0]] and settings["torch_dtype"] == np.dtype(dtype).name
        read, back = read_hf(tmp_path / "hf")
        assert read == model
        assert same(back, parameters)

    @pytest.mark.parametrize("name", MODELS)
    def test_theirs_to_ours_and_back(self, name: str, tmp_path: Path) -> None:
        """Same tensors to the bit and same config as in a folder written by transformers."""
        transformers = pytest.importorskip("transformers")
        first, second = tmp_path / "first", tmp_path / "second"
        class_name = name.split()[0]
        config_class = getattr(
            transformers, class_name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") + "Config"
        )
        config = config_class(**to_settings(MODELS[name], "float32"))
        getattr(transformers, class_name)(config).save_pretrained(first)
        model, parameters = read_hf(first)
        assert model == MODELS[name]
        saved(second, model, parameters)
        assert same(load_file(second / "model.safetensors"), load_file(first / "model.safetensors"))
        there = config_class.from_pretrained(second).to_dict()
        for key, value in config_class.from_pretrained(first).to_dict().items():
            assert there[key] == value or key.endswith("_token_id"), key

    @pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
    def test_shards(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 700)
        model, parameters = MODELS[name], draw(MODELS[name])
        folder = saved(tmp_path / "hf", model, parameters)
        files = sorted(folder.glob("*.safetensors"))
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in parameters.values())
        for file in files:
            tensors = load_file(file)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 700
            assert all(index["weight_map"][tensor] == file.name for tensor in tensors)
        assert same(read_hf(folder)[1], parameters)

    def test_every_parameter_has_one_row(self) -> None:
        for model in MODELS.values():
            shapes = shapes_of(model)
            ours = [name for row in table_of(HUGGINGFACE, model).rows_of(shapes) for name in row.ours]
            assert sorted(ours) == sorted(shapes)


class TestFilesInTheWild:
    def rewrite(self, folder: Path, change: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Path:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})
        return folder

    @pytest.mark.parametrize("name", ["LlamaForCausalLM biases", "GPT2LMHeadModel"])
    def test_without_prefix(self, name: str, tmp_path: Path) -> None:
        model, parameters = MODELS[name], draw(MODELS[name])
        prefix = table_of(HUGGINGFACE, model).prefix
        folder = saved(tmp_path / "hf", model, parameters)
        self.rewrite(folder, lambda t: {key.removeprefix(prefix): value for key, value in t.items()})
        assert same(read_hf(folder)[1], parameters)

    def test_buffers_are_no_weights(self, tmp_path: Path) -> None:
        gpt2, llama = MODELS["GPT2LMHeadModel"], MODELS["LlamaForCausalLM biases"]
        masks = {
            f"transformer.h.{i}.attn.{kind}": np.ones((1, 1, 12, 12), bool)
            for i in range(3)
            for kind in ("bias", "masked_bias")
        }
        angles = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32) for i in range(3)}
        for model, extra in ((gpt2, masks), (llama, angles)):
            folder = saved(tmp_path / model.family, model)
            self.rewrite(folder, functools.partial(operator.or_, extra))
            assert same(read_hf(folder)[1], draw(model))

    def test_a_tied_head(self, tmp_path: Path) -> None:
        model = MODELS["Qwen2ForCausalLM"]
        folder = saved(tmp_path / "hf", model)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        self.rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
        assert same(read_hf(folder)[1], draw(model))
        self.rewrite(folder, lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"] + 1})
        with pytest.raises(ConfigError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
            read_hf(folder)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"},
                r"model.norm.weight is absent there, and \(8,\) in the model",
            ),
            (
                lambda t: t | {"model.extra": np.ones(3)},
                r"tensor model.extra is \(3,\) there, and absent in the model; remove it from the file, or give",
            ),
            (
                lambda t: t | {"model.norm.weight": np.ones(9)},
                r"tensor model.norm.weight is \(9,\) there, and \(8,\) in the model",
            ),
            (
                lambda t: t | {"model.norm.weight": np.ones(8, np.int8)},
                r"tensor model.norm.weight is int8; give float64",
            ),
            (lambda t: t | {"norm.weight": np.ones(8)}, r"norm.weight are the same parameter"),
            (
                lambda t: t | {"model.layers.3.mlp.up_proj.weight": np.ones((10, 8))},
                r"layers.3.mlp.up_proj.weight is \(10, 8\) .* absent",
            ),
        ],
    )
    def test_tensors_that_do_not_fit(self, change: Any, message: str, tmp_path: Path) -> None:
        folder = self.rewrite(saved(tmp_path / "hf", MODELS["LlamaForCausalLM"]), change)
        with pytest.raises(ConfigError, match=message):
            main([str(folder), str(tmp_path / "run")])
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def test_damaged_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(safetensors_writer, "SHARD_BYTES", 700)
        folder = saved(tmp_path / "hf", MODELS["LlamaForCausalLM"])
        first, second = sorted(folder.glob("*.safetensors"))[:2]
        original = second.read_bytes()
        second.write_bytes(original[:-8])
        with pytest.raises(ConfigError, match=r"hf: .*give a folder with intact safetensors files"):
            read_hf(folder)
        second.unlink()
        with pytest.raises(ConfigError, match=second.name):
            read_hf(folder)
        second.write_bytes(first.read_bytes())
        with pytest.raises(ConfigError, match=r"is in another file of the folder too"):
            read_hf(folder)
        (folder / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"give an index with a weight_map"):
            read_hf(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of a Qwen3."""
    model = MODELS["Qwen3ForCausalLM"]
    run_of(tmp_path / "run", model)
    return tmp_path / "run"


class TestCommandLine:
    @pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "Qwen2ForCausalLM"])
    def test_hf_to_orbax_and_back(self, name: str, tmp_path: Path) -> None:
        hf, run, back = (str(tmp_path / part) for part in ("hf", "run", "back"))
        saved(Path(hf), MODELS[name])
        main([hf, run])
        read = checkpoint.read(Path(run))
        assert read.step == 0 and read.experiment.model == MODELS[name] and same(read.parameters, draw(MODELS[name]))
        main([str(Path(run) / "checkpoints" / "0"), back])
        for file in ("config.json", "model.safetensors"):
            assert (Path(back) / file).read_bytes() == (Path(hf) / file).read_bytes()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_dtype(self, dtype: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "BLOCK", 7)
        main([str(run), str(tmp_path / "hf"), "--dtype", dtype])
        wanted = draw(MODELS["Qwen3ForCausalLM"])
        assert same(read_hf(tmp_path / "hf")[1], {n: a.astype(np.dtype(dtype)) for n, a in wanted.items()})
        main([str(tmp_path / "hf"), str(tmp_path / "orbax")])
        assert same(checkpoint.read(tmp_path / "orbax").parameters, read_hf(tmp_path / "hf")[1])
        main([str(tmp_path / "hf"), str(tmp_path / "master"), "--dtype", "float32"])
        assert {str(a.dtype) for a in checkpoint.read(tmp_path / "master").parameters.values()} == {"float32"}

    def test_a_value_beyond_the_dtype(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream, "BLOCK", 3)
        model = MODELS["LlamaForCausalLM"]
        scale = np.ones(8, np.float32)
        scale[7] = 7e4
        saved(tmp_path / "hf", model, draw(model) | {"norm.scale": scale})
        with pytest.raises(ConfigError, match=r"--dtype float16: parameter model.norm.weight has values beyond"):
            main([str(tmp_path / "hf"), str(tmp_path / "half"), "--to", "hf", "--dtype", "float16"])
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def test_the_same_kind_keeps_files_beside_the_weights(self, tmp_path: Path) -> None:
        folder = saved(tmp_path / "hf", MODELS["GPT2LMHeadModel"])
        (folder / "tokenizer.json").write_text("{}")
        (folder / "notes.txt").write_text("mine")
        main([str(folder), str(tmp_path / "half"), "--to", "hf", "--dtype", "bfloat16"])
        names = {"config.json", "model.safetensors", "tokenizer.json", "notes.txt"}
        assert {path.name for path in (tmp_path / "half").iterdir()} == names

    def test_model(self, run: Path, tmp_path: Path) -> None:
        wanted = tmp_path / "wanted.toml"
        main([str(run), str(tmp_path / "hf")])
        config = (run / "config.toml").read_text()
        wanted.write_text(config.replace("steps = 300", "steps = 7").replace("positions = 12", "positions = 99"))
        main([str(tmp_path / "hf"), str(tmp_path / "fits"), "--model", str(wanted)])
        kept = read_experiment(checkpoint.locate(tmp_path / "fits"))
        assert kept.train.steps == 7 and kept.model.model_dump()["positions"] == 99
        wanted.write_text(config.replace("norm_eps = 1e-06", "norm_eps = 1e-05"))
        with pytest.raises(ConfigError, match=r"model.norm_eps = 1e-05, but \S+ holds another model, with 1e-06; set"):
            main([str(tmp_path / "hf"), str(tmp_path / "not"), "--model", str(wanted)])
        assert not (tmp_path / "not").exists()

    @pytest.mark.parametrize("kind", ["hf", "orbax"])
    def test_inspect(self, kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        source, parameters = run, draw(MODELS["Qwen3ForCausalLM"])
        if kind == "hf":
            source = saved(tmp_path / "hf", MODELS["Qwen3ForCausalLM"])
            parameters = load_file(source / "model.safetensors")
        main(["--inspect", str(source), "--json"])
        listing = json.loads(capsys.readouterr().out)
        assert (listing["kind"], listing["family"]) == (kind, "llama")
        wanted: list[dict[str, Any]] = [
            {"name": n, "shape": list(a.shape), "dtype": "float32", "bytes": a.nbytes}
            for n, a in sorted(parameters.items())
        ]
        assert listing["tensors"] == wanted and listing["bytes"] == sum(row["bytes"] for row in wanted)
        main(["--inspect", str(source)])
        shown = capsys.readouterr().out
        assert all(name in shown for name in parameters) and f"{len(parameters)} tensors" in shown

    @pytest.mark.parametrize("place", ["hf/model.safetensors", "run/checkpoints/0/parameters"])
    def test_inspect_a_tree_that_only_a_mapping_converts(
        self, place: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        saved(tmp_path / "hf", MODELS["Qwen3ForCausalLM"])
        source = run / place.removeprefix("run/") if place.startswith("run") else tmp_path / place
        main(["--inspect", str(source), "--json"])
        listing = json.loads(capsys.readouterr().out)
        assert sum(math.prod(row["shape"]) for row in listing["tensors"]) == sum(
            array.size for array in draw(MODELS["Qwen3ForCausalLM"]).values()
        )

    def test_a_name_with_escapes_is_inspected(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = saved(tmp_path / "hf", MODELS["Qwen3ForCausalLM"])
        save_file({"\x1b[2J": np.zeros(3, np.float32)}, folder / "model.safetensors")
        main(["--inspect", str(folder)])
        shown = capsys.readouterr().out
        assert "\x1b" not in shown and r"\x1b[2J" in shown

    def test_nothing_half_written(self, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk that fills up after the config and one shard."""

        def full(*_: Any, **__: Any) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(buffers, "write", full)
        with pytest.raises(TrainingError, match=r"TARGET \S+ could not be written: No space left on device; nothing"):
            main([str(run), str(tmp_path / "hf")])
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["nowhere", "new"], r"nowhere: no such file or folder"),
            (["occupied", "new"], r"occupied: no checkpoint of a known kind"),
            (["run", "occupied"], r"TARGET occupied exists"),
            (["run"], r"TARGET is missing"),
            (["run", "circle", "--force"], r"TARGET: 'circle': .*symbolic links"),
            (["run", "circle/new"], r"TARGET: 'circle/new': .*symbolic links"),
            (["run", "new", "--inspect"], r"--inspect with TARGET new"),
            (["run", "new", "--json"], r"--json belongs to --inspect"),
            (
                ["run", "new", "--to", "onnx"],
                r"--to: invalid choice: 'onnx'; choose from hf, .*, or give --plugins",
            ),
            (["run", "new", "--dtyp", "float16"], r"unknown argument '--dtyp'; did you mean '--dtype'"),
            (["run", "new", "--model", "defualt"], r"--model defualt: .*did you mean 'default'"),
            (["run", "new", "--model", "none.toml"], r"--model none.toml: .*No such file"),
            (["run", "--inspect", "--verify"], r"--inspect with --verify: .*leave one out"),
            (["run", "--inspect", "--dry-run"], r"--inspect with --dry-run: .*leave one out"),
            (["run", "--inspect", "--force"], r"--inspect with --force: .*leave one out"),
            (["run", "--inspect", "--ema"], r"--inspect with --ema: .*leave one out"),
            (["run", "--inspect", "--to", "hf"], r"--inspect with --to: .*leave one out"),
            (["run", "--inspect", "--dtype", "float16"], r"--inspect with --dtype: .*leave one out"),
            (["run", "--inspect", "--model", "default"], r"--inspect with --model: .*leave one out"),
            (["run", "new", "--dry-run", "--verify"], r"--dry-run with --verify: .*leave one out"),
            (
                ["run", "new.safetensors"],
                r"TARGET new.safetensors: .safetensors ends the name of a file.*; give the name of one$",
            ),
            (["run", "new.pt", "--to", "hf"], r"TARGET new.pt: .pt ends the name of a file.*; give .*, or --to torch"),
            (
                ["run", "new.ckpt", "--to", "dcp"],
                r"TARGET new.ckpt: .ckpt ends the name of a file.*; give .*, or --to torch",
            ),
            (["lone.safetensors", "new"], r"lone.safetensors: .*give its folder \., with config.json"),
            (["", "new"], r"SOURCE: '' is not a path"),
            (["run", ""], r"TARGET: '' is not a path"),
        ],
    )
    def test_bad_arguments(
        self, argv: list[str], message: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "occupied").mkdir()
        (tmp_path / "circle").symlink_to("circle")
        save_file({"a": np.zeros(3, np.float32)}, tmp_path / "lone.safetensors")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ConfigError, match=message):
            main(argv)
        assert sorted(tmp_path.rglob("*")) == before

    @pytest.mark.long
    def test_exit_code(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "jaxdist.convert", str(tmp_path / "nowhere"), str(tmp_path / "new")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
