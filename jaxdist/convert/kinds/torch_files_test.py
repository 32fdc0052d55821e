"""Training scripts' files from `torch.save`: read in any form, and given back unchanged."""

import importlib
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from jaxdist.config import ConfigError
from jaxdist.config.optimizer import MOMENTS
from jaxdist.conftest import often
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Origin
from jaxdist.convert.convert_test import MODELS
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds import orbax_files
from jaxdist.convert.kinds.formats_test import content_of, tensors, written
from jaxdist.convert.mappings.atoms import full_entry
from jaxdist.formats.hf import experiment_for

pytestmark = pytest.mark.long

torch = pytest.importorskip("torch")
torch_files = importlib.import_module("jaxdist.convert.kinds.torch_files")
rules = importlib.import_module("jaxdist.convert.optimizers.rules")

PREFIXES = ("module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module.")


class TorchFiles:
    """A training script's file and its model."""

    model = MODELS["Qwen2ForCausalLM"]

    def saved(self, path: Path, **parts: Any) -> dict[str, Any]:
        """A training script's file of model, optimizer and step, with `parts` replacing or removing entries."""
        written(path, "torch", content_of(self.model))
        tree = torch.load(path, weights_only=True)
        tree = {key: value for key, value in (tree | parts).items() if value is not None}
        torch.save(tree, path)
        return tree

    def config(self, folder: Path, schedule: bool = False) -> str:
        """A model section alone, or all sections."""
        file, experiment = folder / "model.toml", experiment_for(self.model.model_dump(), "test")
        file.write_text(experiment.to_toml() if schedule else tomli_w.dumps(experiment.model_dump(exclude_unset=True)))
        return str(file)


class TestTorchFiles(TorchFiles):
    @pytest.mark.parametrize("prefix", often(PREFIXES, ["module._orig_mod."]))
    def test_wrappers_prefixes(self, prefix: str, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        right = tensors(tmp_path / "a.pt")
        tree["model"] = {prefix + name: tensor for name, tensor in tree["model"].items()}
        torch.save(tree, tmp_path / "a.pt")
        assert tensors(tmp_path / "a.pt") == right
        main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        assert list(torch.load(tmp_path / "b.pt", weights_only=True)["model"]) == list(tree["model"])

    def test_inside_of_a_path(self, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        right = tensors(tmp_path / "a.pt")
        wrapped = {name.replace("layers.", "layers._fsdp_wrapped_module.", 1): t for name, t in tree["model"].items()}
        torch.save(tree | {"model": wrapped}, tmp_path / "a.pt")
        assert tensors(tmp_path / "a.pt") == right

    def test_a_bare_state_dict_needs_a_model(self, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        torch.save(tree["model"], tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"a.pt does not say what model it is; give --model"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", self.config(tmp_path)])
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        same(torch.load(tmp_path / "b.pt", weights_only=True), dict(tree["model"]))

    def test_a_round_trip_of_a_real_script(self, tmp_path: Path) -> None:
        """torch's own module and optimizer load the written file and give it back, scaler and RNG included."""
        transformers = pytest.importorskip("transformers")
        from jaxdist.formats.hf import to_settings

        module = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**to_settings(self.model, "float32")))
        named = dict(module.named_parameters())
        decayed = [item for item in named.items() if item[1].ndim >= 2]
        others = [item for item in named.items() if item[1].ndim < 2]
        optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for _ in range(3):
            module(input_ids=torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        saved = {
            "model": {f"module.{name}": tensor for name, tensor in module.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "scheduler": schedule.state_dict(),
            "scaler": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
            "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 3}},
            "rng": torch.get_rng_state(),
            "numpy": np.random.RandomState(3).get_state(),
            "best": {"loss": np.float64(1.25), "last": np.arange(6, dtype=">i4").reshape(2, 3).T},
            "epoch": 2,
        }
        torch.save(saved, tmp_path / "a.pt")
        config = self.config(tmp_path)
        main([str(tmp_path / "a.pt"), str(tmp_path / "run"), "--model", config])
        main([str(tmp_path / "run"), str(tmp_path / "dcp"), "--to", "dcp"])
        main([str(tmp_path / "dcp"), str(tmp_path / "b.pt"), "--verify"])
        # numpy's objects are more than tensors and plain values
        back = torch.load(tmp_path / "b.pt", weights_only=False)
        np.random.RandomState().set_state(back["numpy"])
        assert np.array_equal(back["numpy"][1], saved["numpy"][1]) and back["numpy"][2:] == saved["numpy"][2:]
        assert type(back["best"]["loss"]) is np.float64 and back["best"]["loss"] == 1.25
        assert np.array_equal(back["best"]["last"], saved["best"]["last"])  # read by numpy, in its own byte order
        for key in ("scaler", "amp", "epoch"):
            assert back[key] == saved[key]
        assert torch.equal(back["rng"], saved["rng"]) and back["scheduler"]["last_epoch"] == 3
        assert list(back) == list(saved)
        assert list(back["model"]) == list(saved["model"])
        module.load_state_dict({name.removeprefix("module."): t for name, t in back["model"].items()})
        optimizer.load_state_dict(back["optimizer"])
        schedule.load_state_dict(back["scheduler"])
        after = optimizer.state_dict()
        for i, state in saved["optimizer"]["state"].items():
            assert all(torch.equal(after["state"][i][kind], state[kind]) for kind in ("step", *MOMENTS))

    @pytest.mark.parametrize(
        "order", often(["one group", "others first", "unnamed", "by name"], ["others first", "unnamed"])
    )
    def test_orders_of_an_optimizer(self, order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        optimizer = self.saved(tmp_path / "a.pt")["optimizer"]
        right = tensors(tmp_path / "a.pt")
        names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
        by_name = dict(zip(names, optimizer["state"].values(), strict=True))
        shapes = entries("huggingface", self.model)
        decayed, others = ([n for n in shapes if (len(shapes[n].shape) >= 2) == wide] for wide in (True, False))
        groups = {
            "one group": [list(shapes)],
            "others first": [others, decayed],
            "unnamed": [decayed, others],
            "by name": [names],
        }[order]
        order_of = [name for group in groups for name in group]
        numbers = {name: name if order == "by name" else i for i, name in enumerate(order_of)}
        changed = {
            "state": {numbers[name]: by_name[name] for name in order_of},
            "param_groups": [
                {"lr": 0.1, "weight_decay": 0.1, "params": [numbers[n] for n in group]} for group in groups
            ],
        }
        self.saved(tmp_path / "a.pt", optimizer=changed)
        capsys.readouterr()
        assert tensors(tmp_path / "a.pt") == right
        assert "decayed norms and biases too (" in capsys.readouterr().out
        main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        same(torch.load(tmp_path / "b.pt", weights_only=True)["optimizer"], changed)

    def test_a_state_dict_that_is_sorted_by_name(self, tmp_path: Path) -> None:
        """The optimizer numbers parameters in the model's order."""
        tree, right = self.saved(tmp_path / "a.pt"), tensors(tmp_path / "a.pt")
        optimizer, order = tree["optimizer"], [*entries("huggingface", self.model)]
        names = [name for group in optimizer["param_groups"] for name in group["param_names"]]
        by_name = dict(zip(names, optimizer["state"].values(), strict=True))
        changed = {
            "state": {i: by_name[name] for i, name in enumerate(order)},
            "param_groups": [{"lr": 0.1, "weight_decay": 0.1, "params": [*range(len(order))]}],
        }
        self.saved(tmp_path / "a.pt", model=dict(sorted(tree["model"].items())), optimizer=changed)
        assert tensors(tmp_path / "a.pt") == right

    def test_two_orders_that_fit(self) -> None:
        """Sorted names and equal shapes: nothing tells which entry is whose."""
        entry = {kind: torch.ones(2, 2) for kind in MOMENTS}
        state: Any = {"state": {0: entry, 1: entry}, "param_groups": [{"params": [0, 1]}]}
        shapes = dict.fromkeys("ab", (2, 2))
        of_model = {name: full_entry(name, (name, 0), (2, 2)) for name in "ba"}
        with pytest.raises(ConfigError, match=r"sorted by name, and its optimizer fits them both .* param_names"):
            rules.order_of("a.pt", state, shapes, lambda *_: of_model, str)
        state["param_groups"][0]["param_names"] = ["b", "a"]
        assert rules.order_of("a.pt", state, shapes, lambda *_: of_model, str)[1] == {0: "b", 1: "a"}

    def test_an_order_that_cannot_be(self, tmp_path: Path) -> None:
        optimizer = self.saved(tmp_path / "a.pt")["optimizer"]
        for group in optimizer["param_groups"]:
            del group["param_names"]
        optimizer["param_groups"][0]["params"].reverse()
        optimizer["param_groups"][1]["params"].reverse()
        self.saved(tmp_path / "a.pt", optimizer=optimizer)
        with pytest.raises(ConfigError, match=r"has \d+ entries in 2 groups, in no order"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])

    @pytest.mark.parametrize("given_names", [True, False])
    def test_parameters_that_are_not_trained(self, given_names: bool, tmp_path: Path) -> None:
        """They have no moments; the message gives a fix, and names if the file has them."""
        optimizer = self.saved(tmp_path / "a.pt")["optimizer"]
        name = optimizer["param_groups"][0]["param_names"][0]
        del optimizer["state"][optimizer["param_groups"][0]["params"][0]]
        for group in optimizer["param_groups"]:
            if not given_names:
                del group["param_names"]
        self.saved(tmp_path / "a.pt", optimizer=optimizer)
        message = f"none for {name}" if given_names else "none for the others"
        with pytest.raises(ConfigError, match=rf"entries for \d+ parameters, and {message}, .*weights alone, --to hf"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        main([str(tmp_path / "a.pt"), str(tmp_path / "hf"), "--to", "hf"])

    @pytest.mark.parametrize(
        "optimizer",
        [
            {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"params": [0], "lr": 0.1}]},
            {"state": {0: {}}, "param_groups": [{}]},
            {"state": {0: {}}, "param_groups": [5]},
            {"state": {"norm": 3}, "param_groups": []},
            {"state": [1, 2], "param_groups": None},
        ],
        ids=str,
    )
    def test_an_optimizer_of_another_kind(self, optimizer: dict[str, Any], tmp_path: Path) -> None:
        self.saved(tmp_path / "a.pt", optimizer=optimizer)
        with pytest.raises(ConfigError, match=r"a.pt: its optimizer"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])

    def test_a_file_of_old(self, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        right = tensors(tmp_path / "a.pt")
        torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
        assert tensors(tmp_path / "a.pt") == right

    def test_views_and_transposes_are_read_as_they_are(self, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        right = tensors(tmp_path / "a.pt")
        tree["model"] = {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in tree["model"].items()}
        torch.save(tree, tmp_path / "a.pt")
        assert tensors(tmp_path / "a.pt") == right

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
    def test_damage(self, damage: str, tmp_path: Path) -> None:
        self.saved(tmp_path / "a.pt")
        data = (tmp_path / "a.pt").read_bytes()
        broken = {"cut": data[:-900], "flipped": data[:70] + b"\xff" * 90 + data[160:], "empty": b"", "text": b"hello"}
        (tmp_path / "a.pt").write_bytes(broken[damage])
        with pytest.raises(ConfigError, match=r"a.pt: it is empty; give" if damage == "empty" else r"a.pt"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("kind", ["run", "file"])
    def test_views_of_one_storage(self, kind: str, tmp_path: Path) -> None:
        """A script's other tensors may be slices of one flat tensor, or transposed."""
        flat, matrix = torch.arange(12.0), torch.arange(6.0).reshape(2, 3)
        averages = {"a": flat[:4], "b": flat[4:8], "c": flat[8:], "turned": matrix.T, "half": flat.bfloat16()[1:3]}
        saved = self.saved(tmp_path / "a.pt", ema=averages)
        if kind == "run":
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        main([str(tmp_path / ("run" if kind == "run" else "a.pt")), str(tmp_path / "b.pt")])
        back = torch.load(tmp_path / "b.pt", weights_only=True)["ema"]
        assert back.keys() == saved["ema"].keys() == averages.keys()
        for name, tensor in averages.items():
            assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name

    @pytest.mark.parametrize("kind", ["torch", "dcp"])
    def test_checksums(self, kind: str, tmp_path: Path) -> None:
        """Each record has one, as torch.save writes it; a flipped bit is found."""
        source = written(tmp_path / "made", kind, content_of(self.model))
        files = sorted(source.rglob("*.distcp")) if kind == "dcp" else [source]
        assert len(files) == (1 if kind == "torch" else 4 * len(entries("torch_ref", self.model)) + 1)
        for file in files:
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None
                records = [info for info in archive.infolist() if "/data/" in info.filename]
                record = max(records, key=lambda info: info.file_size)
        content = bytearray(files[-1].read_bytes())
        content[record.header_offset + record.file_size] ^= 1
        files[-1].write_bytes(content)
        with zipfile.ZipFile(files[-1]) as archive:
            assert archive.testzip() is not None
        if kind == "torch":
            with pytest.raises(ConfigError, match=r"its record \S+ has changed since it was written"):
                main([str(source), str(tmp_path / "run"), "--verify"])

    def test_a_copy_of_a_checkpoint_is_of_no_run(self, tmp_path: Path) -> None:
        """The files beside the copy need not belong to it."""
        self.saved(tmp_path / "a.pt")
        main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        (found,) = (tmp_path / "run" / "checkpoints").iterdir()
        copy = shutil.copytree(found, tmp_path / "run" / "exports" / found.name)
        assert orbax_files.read_content(found).origin.kind == "torch"
        assert orbax_files.read_content(copy).origin == Origin()

    @pytest.mark.parametrize("what", ["origin.json", "extras.pt", "files/config.json"])
    def test_damage_to_files_kept_for_the_way_back(self, what: str, tmp_path: Path) -> None:
        self.saved(tmp_path / "a.pt")
        (tmp_path / "config.json").write_text("{}")
        main([str(tmp_path / "a.pt"), str(tmp_path / "run")])
        file = tmp_path / "run" / "origin" / what
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"origin is damaged: its file {what} has changed"):
            main([str(tmp_path / "run"), str(tmp_path / "b.pt")])
        file.unlink()
        with pytest.raises(ConfigError, match=rf"origin is damaged: its file {what} is missing"):
            main([str(tmp_path / "run"), str(tmp_path / "b.pt")])

    def test_foreign_files_in_a_run(self, tmp_path: Path) -> None:
        """They neither replace weights nor lead outside."""
        source = written(tmp_path / "a", "hf", content_of(self.model))
        main([str(source), str(tmp_path / "run")])
        files = tmp_path / "run" / "origin" / "files"
        (files / "model.safetensors").write_text("mine")
        main([str(tmp_path / "run"), str(tmp_path / "b"), "--to", "hf"])
        assert tensors(tmp_path / "b") == tensors(source)
        (tmp_path / "secret").write_text("secret")
        (files / "tokenizer.json").symlink_to(tmp_path / "secret")
        with pytest.raises(ConfigError, match=r"'tokenizer\.json' is outside of"):
            main([str(tmp_path / "run"), str(tmp_path / "c"), "--to", "hf"])

    def test_a_tensor_that_shows_few_numbers_often(self, tmp_path: Path) -> None:
        tree = self.saved(tmp_path / "a.pt")
        torch.save(tree | {"more": torch.zeros(1).expand(10**14)}, tmp_path / "a.pt")
        with pytest.raises(ConfigError, match=r"a tensor \(100000000000000,\) is larger than the file"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])

    def test_a_zip_without_its_directory(self, tmp_path: Path) -> None:
        self.saved(tmp_path / "a.pt")
        data = (tmp_path / "a.pt").read_bytes()
        place = data.index(b"PK\x01\x02")
        (tmp_path / "a.pt").write_bytes(data[:place] + b"none" + data[place + 4 :])
        with pytest.raises(ConfigError, match=r"a.pt"):
            main([str(tmp_path / "a.pt"), str(tmp_path / "run")])


def same(a: Any, b: Any) -> None:
    """Assert that two trees are the same to the bit; a tuple may have become a list."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    else:
        assert a == b
