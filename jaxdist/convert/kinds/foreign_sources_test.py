"""Other programs' checkpoints: wrappers' names, other names of parts, layers of several dtypes."""

import importlib
import json
import pickle
import shutil
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from jaxdist.config import ConfigError
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.kinds import orbax_files
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.stream import Conversion
from jaxdist.convert.weights import source_experiment
from jaxdist.formats.dcp_index import Index, read_index
from jaxdist.formats.hf import experiment_for, to_settings
from jaxdist.formats.orbax import read_experiment
from jaxdist.runs.checkpoints import checkpoint_in
from jaxdist.training import checkpoint

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
tree_flatten_with_path = importlib.import_module("torch.utils._pytree").tree_flatten_with_path
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
dcp_files = importlib.import_module("jaxdist.convert.kinds.dcp_files")
dcp = importlib.import_module("torch.distributed.checkpoint")

MODEL, TIED = MODELS["Qwen2ForCausalLM"], MODELS["Qwen3ForCausalLM"]
WEIGHTS = "model.safetensors"


def config(folder: Path, model: Any = MODEL) -> list[str]:
    file = folder / "model.toml"
    file.write_text(experiment_for(model.model_dump(), "test").to_toml())
    return ["--model", str(file)]


def save_distributed(folder: Path, tree: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns that there is no process group
        dcp.save(tree, checkpoint_id=folder, no_dist=True)


def names(folder: Path) -> list[str]:
    """Names as in the file."""
    return sorted(load_file(folder / WEIGHTS))


class TestNames:
    """A Hugging Face folder has transformers' names, whatever the weights came from."""

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
    def test_wrappers_of_a_folder(self, prefix: str, tmp_path: Path) -> None:
        """Their prefixes are recognized, and come back."""
        right, source = (written(tmp_path / name, "hf", content_of(MODEL)) for name in ("right", "a"))
        wrapped = {prefix + name: tensor for name, tensor in load_file(source / WEIGHTS).items()}
        save_file(wrapped, source / WEIGHTS, {"format": "pt"})
        assert tensors(source) == tensors(right)
        main([str(source), str(tmp_path / "run"), "--to", "orbax"])
        main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"])
        assert names(tmp_path / "back") == sorted(wrapped)

    @pytest.mark.parametrize("prefix", often(["module.", "_orig_mod.", "_fsdp_wrapped_module."], ["module."]))
    @pytest.mark.parametrize("through", ["", "orbax", "dcp"])
    def test_wrappers_stay_behind(self, prefix: str, through: str, tmp_path: Path) -> None:
        right = written(tmp_path / "right", "hf", content_of(MODEL))
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        tree = torch.load(file, weights_only=True)
        torch.save(tree | {"model": {prefix + name: tensor for name, tensor in tree["model"].items()}}, file)
        source = file
        if through:
            main([str(source), str(source := tmp_path / "there"), "--to", through])
        main([str(source), str(tmp_path / "hf"), "--to", "hf"])
        assert names(tmp_path / "hf") == names(right)

    def test_a_tied_head_is_in_a_file_and_not_in_a_folder(self, tmp_path: Path) -> None:
        assert TIED.tied
        source = written(tmp_path / "a", "hf", content_of(TIED))
        main([str(source), str(tmp_path / "b.pt")])
        assert "lm_head.weight" in torch.load(tmp_path / "b.pt", weights_only=True)["model"]
        main([str(tmp_path / "b.pt"), str(tmp_path / "c"), "--to", "hf"])
        assert names(tmp_path / "c") == names(source)

    @pytest.mark.parametrize("kind", often(["hf", "torch", "dcp"], ["hf", "torch"]))
    def test_a_tied_head_without_the_embedding(self, kind: str, tmp_path: Path) -> None:
        """`safetensors.torch.save_model` keeps the alphabetically first of two names."""
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        intact = written(tmp_path / "whole", "hf" if kind == "hf" else "torch", content_of(TIED))
        source, model = tmp_path / "source", config(tmp_path, TIED)

        def renamed(tensors: Any) -> Any:
            return {name: t for name, t in tensors.items() if name != embedding} | {head: tensors[embedding]}

        if kind == "hf":
            shutil.copytree(intact, source)
            save_file(renamed(load_file(intact / WEIGHTS)), source / WEIGHTS)
        else:
            tree = torch.load(intact, weights_only=True)
            tree["model"] = renamed(tree["model"])
        if kind == "torch":
            torch.save(tree, source)
        if kind == "dcp":
            called = [name for group in tree["optimizer"]["param_groups"] for name in group["param_names"]]
            state = renamed(dict(zip(called, tree["optimizer"]["state"].values(), strict=True)))
            save_distributed(source, {"model": tree["model"], "optim": {"state": state}, "step": 7})
        for name, path in (("right", intact), ("run", source)):
            main([str(path), str(tmp_path / name), "--to", "orbax", *model])
        assert tensors(tmp_path / "run") == tensors(tmp_path / "right")
        main([str(tmp_path / "run"), str(tmp_path / "back"), "--to", kind])
        before, after = (set(KINDS[kind].format.described(path)) for path in (source, tmp_path / "back"))
        assert after == before and head in after and embedding not in after

    def test_another_programs_config_beside_a_file(self, tmp_path: Path) -> None:
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        for other in ('{"batch": 3}', "[1, 2]", "{"):
            (tmp_path / "config.json").write_text(other)
            main([str(file), str(tmp_path / "hf"), "--to", "hf", "--force", *config(tmp_path)])
            assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "qwen2"


class TestDistributed:
    """Trees of other programs saved by torch.distributed.checkpoint."""

    def saved(self, folder: Path, tree: Any) -> list[str]:
        save_distributed(folder, tree)
        return [str(folder), str(folder.with_suffix(".run")), *config(folder.parent)]

    @pytest.mark.parametrize("outer", [False, True])
    @pytest.mark.parametrize("optimizer", often(["optim", "optimizer"], ["optim"]))
    def test_the_parts_of_torchs_tutorial(self, outer: bool, optimizer: str, tmp_path: Path) -> None:
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        right, tree = tensors(file), torch.load(file, weights_only=True)
        numbers = tree["optimizer"]["param_groups"]
        called = {i: n for group in numbers for i, n in zip(group["params"], group["param_names"], strict=True)}
        state = {called[i]: entry for i, entry in tree["optimizer"]["state"].items()}
        parts = {"model": dict(tree["model"]), optimizer: {"state": state}, "step": torch.tensor(7)}
        line = self.saved(tmp_path / "dcp", {"app": parts} if outer else parts)
        main(line)
        main([line[1], str(tmp_path / "b.pt")])
        assert tensors(tmp_path / "b.pt") == right

    @pytest.mark.parametrize(
        "kind", often(["weights alone", "in parts", "in parts of an app", "averaged"], ["averaged"])
    )
    @pytest.mark.parametrize("model", [MODEL, TIED])
    def test_it_comes_back_under_its_names(self, kind: str, model: Any, tmp_path: Path) -> None:
        """A state dict alone, and a tree with an optimizer; with a tied head too."""
        tree = torch.load(written(tmp_path / "a.pt", "torch", content_of(model)), weights_only=True)
        names = [name for group in tree["optimizer"]["param_groups"] for name in group["param_names"]]
        state = dict(zip(names, tree["optimizer"]["state"].values(), strict=True))
        weights = {f"module.{name}": tensor for name, tensor in tree["model"].items()}
        parts = {"model": weights, "optim": {"state": {f"module.{n}": entry for n, entry in state.items()}}}
        trees = {"weights alone": weights, "in parts": parts, "in parts of an app": {"app": parts}}
        trees["averaged"] = parts | {"ema": weights}
        source, run, *_ = self.saved(tmp_path / "dcp", trees[kind])
        main([source, run, *config(tmp_path, model)])
        main([run, str(tmp_path / "back"), "--to", "dcp"])
        before, after = (dcp_files.Tensors(checkpoint_in(tmp_path / name)) for name in ("dcp", "back"))
        keys, again = (set(read_index(tensors.folder).state_dict_metadata) for tensors in (before, after))
        assert keys == again
        for name, leaf in before.leaves.items():
            assert leaf.dtype == after.leaves[name].dtype
            assert leaf.read().tobytes() == after.leaves[name].read().tobytes(), name

    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("more", often([0, 20], [20]))
    def test_all_of_a_script(self, flat: bool, more: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """Saved by torch's own functions: groups, schedule, counters and averages come back, the groups updated."""
        transformers = pytest.importorskip("transformers")
        state_dict = importlib.import_module("torch.distributed.checkpoint.state_dict")
        options = state_dict.StateDictOptions(flatten_optimizer_state_dict=flat)

        def script(seed: int) -> tuple[Any, Any, Any]:
            torch.manual_seed(seed)
            module = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**to_settings(MODEL, "float32")))
            wide = [[p for p in module.parameters() if (p.ndim >= 2) == matrices] for matrices in (True, False)]
            groups = [{"params": wide[0]}, {"params": wide[1], "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.03)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
            for _ in range(3):
                module(input_ids=torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            return module, optimizer, schedule

        def tree(module: Any, optimizer: Any, schedule: Any) -> Any:
            model, optim = state_dict.get_state_dict(module, optimizer, options=options)
            train = {"epoch": 3, "best": torch.tensor(1.5), "names": ["a"]}
            return {"app": {"model": model, "optim": optim, "schedule": schedule.state_dict(), "train": train}}

        saved = tree(*script(0))
        source, run, *model = self.saved(tmp_path / "dcp", saved)
        main([source, run, *model])
        o = read_experiment(checkpoint.locate(Path(run))).optimizer
        assert (o.learning_rate, o.beta1, o.beta2, o.eps, o.weight_decay) == (1e-3, 0.8, 0.99, 1e-7, 0.03)
        content = orbax_files.read_content(Path(run))
        content = replace(content, step=content.step + more, updates=content.step + more)
        capsys.readouterr()
        dcp_files.write(tmp_path / "back", Conversion(content, KINDS["dcp"].naming_of(content)))
        assert ("stays as it was" in capsys.readouterr().out) == bool(more)

        other = script(1)
        there = tree(*other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(there, checkpoint_id=checkpoint_in(tmp_path / "back"), no_dist=True)
        parts = there["app"]
        state_dict.set_state_dict(
            *other[:2], model_state_dict=parts["model"], optim_state_dict=parts["optim"], options=options
        )
        taken = {"app": tree(*other)["app"] | {"schedule": parts["schedule"], "train": parts["train"]}}
        right, back = (tree_flatten_with_path(tree)[0] for tree in (saved, taken))
        rate = torch_files.rate_of(content)
        for (path, before), (_, after) in zip(right, back, strict=True):
            last = str(getattr(path[-1], "key", "")).rpartition(".")[-1]
            if isinstance(before, torch.Tensor):
                assert torch.equal(before + more * (last == "step"), after), path
            else:
                assert after == (rate if more and last == "lr" else before), path

    @pytest.mark.parametrize("kind", [int, partial(torch.tensor, dtype=torch.int32)])
    def test_numbers_in_place_of_tensors(self, kind: Any, tmp_path: Path) -> None:
        """Counts as plain numbers, or as tensors of another type, come back as they were; a tensor within a value keeps
        its type."""
        step = kind(5000)
        tree = torch.load(written(tmp_path / "a.pt", "torch", content_of(MODEL)), weights_only=True)
        names = [name for group in tree["optimizer"]["param_groups"] for name in group["param_names"]]
        entries = tree["optimizer"]["state"].values()
        state = {n: {**entry, "step": kind(int(entry["step"]))} for n, entry in zip(names, entries, strict=True)}
        parts = {"model": dict(tree["model"]), "optimizer": {"state": state}, "step": step}
        source, run, *model = self.saved(tmp_path / "dcp", parts | {"pair": (torch.ones(3), 2)})
        main([source, run, *model])
        content = orbax_files.read_content(Path(run))
        assert (content.step, content.updates) == (5000, int(state[names[0]]["step"]))
        later = replace(content, step=5020, updates=19)
        dcp_files.write(tmp_path / "back", Conversion(later, KINDS["dcp"].naming_of(later)))
        back = dcp_files.Tensors(checkpoint_in(tmp_path / "back")).extras()
        for key, count in (("step", 5020), (f"optimizer.state.{names[0]}.step", 19)):
            assert back[key] == count and type(back[key]) is type(step)
            assert getattr(back[key], "dtype", None) == getattr(step, "dtype", None)
        assert torch.equal(back["pair"][0], torch.ones(3)) and back["pair"][1] == 2

    @pytest.mark.parametrize("kind", ["momentum_buffer", "max_exp_avg_sq", "uncounted"])
    def test_the_state_of_another_optimizer(self, kind: str, tmp_path: Path) -> None:
        """Refused as in a torch file: nothing is dropped silently."""
        tree = torch.load(written(tmp_path / "a.pt", "torch", content_of(MODEL)), weights_only=True)
        name = "model.norm.weight"
        moment = torch.ones_like(tree["model"][name])
        state = {"exp_avg": moment, "exp_avg_sq": moment} | ({} if kind == "uncounted" else {"step": 3, kind: moment})
        source, run, *model = self.saved(
            tmp_path / "dcp", {"model": dict(tree["model"]), "optimizer": {"state": {name: state}}}
        )
        message = {"uncounted": "no count of its steps", "max_exp_avg_sq": "its optimizer is AMSGrad, a rule that"}
        with pytest.raises(ConfigError, match=message.get(kind, f"its optimizer keeps .*{kind}")):
            main([source, run, *model])
        main([source, run, *model, "--to", "hf"])  # a folder has no optimizer

    def test_a_models_own_prefix(self, tmp_path: Path) -> None:
        """Hugging Face's `model.` at the top, with head and optimizer beside it."""
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        tree = torch.load(file, weights_only=True)
        assert "lm_head.weight" in tree["model"]
        line = self.saved(tmp_path / "dcp", dict(tree["model"]) | {"optimizer": {"step": torch.tensor(3)}})
        main(line)
        main([line[1], str(tmp_path / "hf"), "--to", "hf"])
        assert tensors(tmp_path / "hf") == tensors(written(tmp_path / "right", "hf", content_of(MODEL)))


class TestDtypes:
    def mixed(self, folder: Path, layer: int) -> Path:
        """One matrix of one layer in bfloat16, the rest in float32."""
        source = written(folder / "a", "hf", content_of(MODEL))
        import ml_dtypes

        found = load_file(source / WEIGHTS)
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        save_file(found | {name: found[name].astype(ml_dtypes.bfloat16)}, source / WEIGHTS, {"format": "pt"})
        return source

    @pytest.mark.parametrize("layer", [0, 1])
    @pytest.mark.parametrize("dry", [[], ["--dry-run"]])
    def test_layers_of_several(self, layer: int, dry: list[str], tmp_path: Path) -> None:
        """All layers are one array of one dtype in jaxdist."""
        source = self.mixed(tmp_path, layer)
        with pytest.raises(ConfigError, match=r"layers.mlp.up_proj.kernel: its layers are bfloat16, float32"):
            main([str(source), str(tmp_path / "b"), *dry])
        assert [p.name for p in tmp_path.iterdir()] == ["a"]
        main([str(source), str(tmp_path / "b"), "--dtype", "float32"])
        main([str(source), str(tmp_path / "c"), "--to", "dcp"])
        main([str(tmp_path / "c"), str(tmp_path / "d"), "--to", "hf"])
        assert tensors(tmp_path / "d") == tensors(source)


def momentum(tree: Any) -> None:
    tree["optimizer"]["param_groups"][0] |= {"momentum_decay": 0.004}


def product(tree: Any) -> None:
    tree["optimizer"]["state"][0] |= {"mu_product": torch.ones(())}


def master(tree: Any) -> None:
    tree["optimizer"] |= {"fp32_groups": [torch.ones(3)]}


def rectified(tree: Any) -> None:
    for group in tree["optimizer"]["param_groups"]:
        group["decoupled_weight_decay"] = False
        del group["amsgrad"]


class TestOptimizers:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (momentum, "is NAdam"),
            (product, "is NAdam"),
            (master, "keeps fp32_groups too"),
            (rectified, "is RAdam"),
        ],
    )
    def test_another_than_adamw_is_refused(self, change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
        """Nothing is dropped silently."""
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        tree = torch.load(file, weights_only=True)
        change(tree)
        torch.save(tree, file)
        with pytest.raises(ConfigError, match=rf"its optimizer .*{message}.*take the weights alone, --to hf"):
            main([str(file), str(tmp_path / "run")])
        assert source_experiment(file).model == MODEL  # as `--init` and `evaluate` read it
        main([str(file), str(tmp_path / "hf"), "--to", "hf"])  # a folder has no optimizer
        assert tensors(tmp_path / "hf") == tensors(written(tmp_path / "right", "hf", content_of(MODEL)))

    def test_fused_adam_of_apex(self, tmp_path: Path) -> None:
        """It counts steps per group."""
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        right, tree = tensors(file), torch.load(file, weights_only=True)
        for entry in tree["optimizer"]["state"].values():
            step = int(entry.pop("step"))
        for group in tree["optimizer"]["param_groups"]:
            group["step"] = step
        torch.save(tree, file)
        assert tensors(file) == right
        main([str(file), str(tmp_path / "run")])
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        groups = torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"]["param_groups"]
        assert [group["step"] for group in groups] == [step] * 2

    def test_a_rate_that_is_taken_for_the_peak_is_reported(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        tree = torch.load(file, weights_only=True)
        for group in tree["optimizer"]["param_groups"]:
            del group["initial_lr"]
            group["lr"] = 2e-4
        torch.save({key: tree[key] for key in ("model", "optimizer")}, file)
        with pytest.raises(ConfigError, match=r"current rate is 0.0002, and the schedule of --model has .*--peak now"):
            main([str(file), str(tmp_path / "run"), *config(tmp_path)])
        main([str(file), str(tmp_path / "run"), *config(tmp_path), "--peak", "now"])
        assert "its current rate, 0.0002, becomes the peak of the schedule of --model" in capsys.readouterr().out


def compressed(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def besides(more: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        torch.save(torch.load(file, weights_only=True) | {"more": more}, file)

    return change


def laughs() -> list[Any]:
    """2^40 values in 40 lists."""
    found: list[Any] = [0]
    for _ in range(40):
        found = [found, found]
    return found


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(100):
        found = [found]
    return found


def sparse_weight(file: Path) -> None:
    tree = torch.load(file, weights_only=True)
    tree["model"]["model.norm.weight"] = tree["model"]["model.norm.weight"].to_sparse()
    torch.save(tree, file)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "compressed": (compressed, "its records are compressed"),
    "laughs": (besides(laughs()), "it holds itself, or more than 10,000,000 values"),
    "itself": (besides(itself()), "it holds itself"),
    "sparse": (besides(torch.eye(3).to_sparse()), "it has a tensor that is torch.sparse_coo"),
    "sparse weight": (sparse_weight, "it has a tensor that is torch.sparse_coo"),
}


class TestHostile:
    @pytest.mark.parametrize("name", HOSTILE)
    @pytest.mark.parametrize("line", [["--inspect"], ["run"]])
    def test_a_file_that_cannot_be_gone_through(self, name: str, line: list[str], tmp_path: Path) -> None:
        change, message = HOSTILE[name]
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        change(file)
        with pytest.raises(ConfigError, match=message):
            main([str(file), *(str(tmp_path / part) if part == "run" else part for part in line)])
        assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]

    def test_lists_that_are_only_deep_or_shared(self, tmp_path: Path) -> None:
        file = written(tmp_path / "a.pt", "torch", content_of(MODEL))
        right, shared = tensors(file), [1, 2]
        besides([deep(), shared, shared])(file)
        main([str(file), str(tmp_path / "run")])
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        assert tensors(tmp_path / "b.pt") == right

    def test_an_index_without_end(self, tmp_path: Path) -> None:
        """Refused by its size, before it is read."""
        with (tmp_path / ".metadata").open("wb") as file:
            file.truncate(10**10)
        (tmp_path / "__0_0.distcp").touch()
        tracemalloc.start()
        with pytest.raises(ConfigError, match=r"\.metadata is refused: it has 10,000,000,000 bytes"):
            main([str(tmp_path), "--inspect"])
        assert tracemalloc.get_traced_memory()[1] < 1e7
        tracemalloc.stop()

    def test_an_index_that_names_much_memory(self, tmp_path: Path) -> None:
        """Nine bytes, for which C's unpickler would allocate 4 GB."""
        run = written(tmp_path / "a", "dcp", content_of(MODEL))
        (index,) = run.rglob(".metadata")
        index.write_bytes(b"\x80\x02]r" + (2**28).to_bytes(4, "little") + b".")
        tracemalloc.start()
        with pytest.raises(ConfigError, match="is refused"):
            read_index(index.parent)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1e6 and not issubclass(Index, pickle.Unpickler)

    def test_a_tokenizer_outside(self, tmp_path: Path) -> None:
        source = written(tmp_path / "a", "hf", content_of(MODEL))
        (tmp_path / "secret").write_text("secret")
        (source / "tokenizer_config.json").symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError, match=r"'tokenizer_config.json' is outside of"):
            main([str(source), str(tmp_path / "b")])

    def test_a_file_beside_an_index(self, tmp_path: Path) -> None:
        """The file is read, as by transformers."""
        source, other = (written(tmp_path / n, "hf", content_of(MODEL)) for n in "ab")
        right = tensors(source)
        wrong = {name: weight + 1 for name, weight in load_file(other / WEIGHTS).items()}
        save_file(wrong, source / "other.safetensors")
        index = {"weight_map": dict.fromkeys(wrong, "other.safetensors")}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        assert tensors(source) == right
