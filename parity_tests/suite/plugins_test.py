"""A package from outside adds an optimizer, a strategy, a data source and a kind of checkpoint.

`toy/toy_plugin` is that package: no file of ours changes for it. Its runs are shared by the tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from jaxdist import train
from jaxdist.config import ConfigError, TrainingError, data, optimizer, plugins, registry, strategies
from jaxdist.config.registry import Registry
from jaxdist.convert.__main__ import main as convert
from jaxdist.formats import kinds
from jaxdist.plan import main as plan
from parity_tests.__main__ import main as prove
from parity_tests.conftest import run
from parity_tests.runs import compare
from parity_tests.runs.run import Run, command
from torch_ref import train as torch_train
from torch_ref.families import models
from torch_ref.families import registry as torch_families
from torch_ref.training import registry as torch_registry

TOY = Path(__file__).parent / "toy"
PLUGIN, STEPS = "toy_plugin", 6
CONFIG: dict[str, Any] = {
    "plugins": [PLUGIN],
    "model": {
        "family": "llama", "layers": 2, "dim": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "hidden": 48,
        "vocab": 64, "positions": 32, "init_std": 0.1,
    },
    "data": {"source": "squares", "path": "61", "sequence": 16},
    "train": {"steps": STEPS, "batch": 8, "accumulation": 2, "validation_batches": 0},
    "optimizer": {"name": "centered", "learning_rate": 0.003, "warmup": 2, "clip": 0.5, "decay_steps": STEPS},
    "parallel": {"mesh": "2x1", "strategy": "fsdp_once"},
    "precision": {"policy": "fp64"},
}  # fmt: skip


@pytest.fixture(scope="module")
def on_path() -> Iterator[None]:
    """The toy packages can be imported by commands, and are loaded here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TOY), os.environ.get("PYTHONPATH", "")]))
        patch.syspath_prepend(str(TOY))
        with registered(PLUGIN, "toy_family"):
            yield


@pytest.fixture(scope="module")
def folder(on_path: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds config.toml, `seed`, a run of no steps, and weights.toy, its weights in the toy's own file."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG), encoding="utf-8")
    drawn = {"steps": 0, "mesh": "1x1", "precision": "fp32", "optimizer.decay_steps": 0}
    seed = run("jaxdist", folder / "seed", folder / "config.toml", drawn)
    convert([str(seed.path), str(folder / "hf"), "--to", "hf"])
    from toy_plugin import checkpoint  # type: ignore[import-not-found]

    sections = {name: CONFIG[name] for name in ("plugins", "model", "data")}
    checkpoint.write(folder / "weights.toy", sections, load_file(folder / "hf/model.safetensors"))
    return folder


@pytest.fixture(scope="module")
def ours(folder: Path) -> Run:
    return trained("jaxdist", folder, {})


@pytest.fixture(scope="module")
def half(folder: Path) -> Run:
    return trained("jaxdist", folder, {"steps": STEPS // 2})


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Run:
    return trained("torch_ref", folder, {})


def trained(side: str, folder: Path, settings: dict[str, Any]) -> Run:
    init = ("--init", str(folder / "weights.toy"))
    name = "-".join([side, *map(str, settings.values())])
    return run(side, folder / name, folder / "config.toml", settings, *init)


TABLES: tuple[Registry[Any], ...] = (
    registry.FAMILIES, torch_families.FAMILIES, optimizer.OPTIMIZERS, strategies.STRATEGIES, data.SOURCES, kinds.KINDS,
    torch_registry.OPTIMIZERS,
)  # fmt: skip


@contextmanager
def registered(*names: str) -> Iterator[None]:
    """Load plugins into this process; remove their rows at the end of the context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "loaded", {})
        for table in TABLES:
            len(table)  # ours are registered by then
            patch.setattr(table, "_rows", dict(table._rows))
            patch.setattr(table, "_owners", dict(table._owners))
        for name in names:
            patch.delitem(sys.modules, name, raising=False)
        plugins.load_plugins(names)
        yield
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.long
def test_both_sides_agree(ours: Run, theirs: Run) -> None:
    assert ours.experiment.plugins == theirs.experiment.plugins == (PLUGIN,)
    assert compare.curve(ours.metrics, theirs.metrics, "loss").max() <= compare.LOSS
    found = compare.states(ours.states, theirs.states)
    assert {name.partition("/")[0] for name in found} == {"weights", "mean_grad", "mean_square"}
    assert max(found.values()) <= 1e-12
    assert ours.metrics[-1]["loss"] < ours.metrics[0]["loss"]


@pytest.mark.long
def test_the_comparison_sees_another_rule(ours: Run, folder: Path) -> None:
    wrong = trained("torch_ref", folder, {"optimizer.beta2": 0.951, "parallel.mesh": "1x1"})
    assert compare.curve(ours.metrics, wrong.metrics, "loss").max() > compare.LOSS


@pytest.mark.long
def test_the_strategy_shards_as_its_row_says(ours: Run, theirs: Run) -> None:
    """Parameters and optimizer state over fsdp, gradients whole, in JAX and in torch."""
    for made in (ours, theirs):
        memory = made.summary["memory"]
        assert memory["gradients"] == pytest.approx(2 * memory["parameters"], rel=0.01)
        assert memory["optimizer_state"] == pytest.approx(2 * memory["parameters"], rel=0.02)
    sent = [{(c["op"], c["axis"]): c["count"] for c in made.summary["collectives"]} for made in (ours, theirs)]
    blocks = CONFIG["model"]["layers"]
    assert sent[1]["reduce_scatter", "fsdp"] == blocks + 1  # once a step, where fsdp has one each microbatch


@pytest.mark.long
@pytest.mark.slow
def test_a_run_goes_on_in_torch_and_a_config_needs_no_flag(half: Run, theirs: Run, tmp_path: Path) -> None:
    """Half of the steps in JAX, through a torch file and a distributed checkpoint, the others in torch by --resume."""
    convert([str(half.path), str(tmp_path / "file.pt")])
    convert([str(tmp_path / "file.pt"), str(tmp_path / "torch"), "--to", "dcp", "--plugins", PLUGIN])
    flags = ["--resume", str(tmp_path / "torch"), "--steps", str(STEPS), "--device", "cpu"]
    done = command("torch_ref.train", *flags)
    assert done.returncode == 0, done.stderr
    resumed = Run("torch_ref", tmp_path / "torch")
    assert compare.curve(resumed.metrics, theirs.metrics, "loss").max() <= compare.LOSS
    assert max(compare.states(resumed.states, theirs.states).values()) <= compare.STATE


@pytest.mark.long
@pytest.mark.slow
def test_a_run_resumes_in_jax(half: Run, ours: Run, tmp_path: Path) -> None:
    resumed = Run("jaxdist", shutil.copytree(half.path, tmp_path / "run"))
    flags = ["--resume", str(resumed.path), "--steps", str(STEPS), "--device", "cpu"]
    done = command("jaxdist.train", *flags)
    assert done.returncode == 0, done.stderr
    assert set(compare.states(resumed.states, ours.states).values()) == {0}


@pytest.mark.long
def test_a_run_folder_is_evaluated_and_planned(folder: Path, ours: Run, capsys: pytest.CaptureFixture[str]) -> None:
    done = command("jaxdist.evaluate", "--checkpoint", str(ours.path), "--batches", "2", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert 0 < json.loads(done.stdout)["loss"] < np.log(CONFIG["model"]["vocab"])
    plan(["--config", str(folder / "config.toml"), "--json"])
    assert json.loads(capsys.readouterr().out)["strategy"] == "fsdp_once"


@pytest.mark.long
def test_weights_are_converted_to_the_bit(folder: Path, tmp_path: Path) -> None:
    convert([str(folder / "weights.toy"), str(tmp_path / "hf"), "--to", "hf", "--plugins", PLUGIN])
    before, after = (load_file(path / "model.safetensors") for path in (folder / "hf", tmp_path / "hf"))
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_its_proof(folder: Path, tmp_path: Path) -> None:
    flags = ["--config", str(folder / "config.toml"), "--init", str(folder / "weights.toy"), "--device", "cpu"]
    done = command("parity_tests", *flags, "--mesh", "2x4", "--output", str(tmp_path / "proof"))
    assert done.returncode == 0 and "Equivalent" in done.stdout, done.stdout + done.stderr


# ---- bad plugins

Package = Callable[[str], str]
TRAIN = ["--device", "cpu", "--mesh", "1x1", "--steps", "1", "--plugins", "bad_plugin"]
ROW = """
import jaxdist, torch_ref
from jaxdist.config import ALL
from jaxdist.families.llama.config import Llama
"""
TAKEN = {
    "family 'llama'": "jaxdist.register_family(jaxdist.Family('llama', Llama, 'a:b'))",
    "family of torch_ref 'llama'": "torch_ref.register_family(torch_ref.Family('llama', 'a:b'))",
    "optimizer 'adamw'": "jaxdist.register_optimizer(jaxdist.UpdateRule('adamw', {}))",
    "strategy 'fsdp'": "jaxdist.register_strategy(jaxdist.Strategy('fsdp', True, True, True))",
    "data source 'files'": "jaxdist.register_data_source(jaxdist.DataSource('files'))",
    "kind of checkpoint 'hf'": "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('hf', 'folder'))",
    "optimizer of torch's side 'sgd'": "torch_ref.register_optimizer(torch_ref.UpdateRule('sgd', 'a:b', 'a:c'))",
}
BARE = (
    "from typing import Literal\nfrom jaxdist.families.llama.config import Llama\n"
    "class Bare(Llama):\n    family: Literal['bare'] = 'bare'\n"
)
WRITTEN = """
jaxdist.register_checkpoint_kind(
    jaxdist.CheckpointKind("bare", "file", lambda path: False, naming="huggingface", module="bad_plugin")
)
"""
SEQUENCES = """
import numpy as np
from jaxdist.data import Sequences, Stream
def sequences(data, model, kind=Sequences):
    return kind(data, Stream([np.full(999, 300, np.int32)], np.array([0, 999])))
"""


def build_in_torch(families: list[str]) -> None:
    plugins.load_plugins(["bad_plugin"])
    for family in families:
        models.build(registry.FAMILIES[family].config.model_validate({"family": family}))


LACKING: dict[str, tuple[str, Callable[[list[str]], None], list[str]]] = {
    "the optimizer 'bare' of plugin 'bad_plugin' has no rule, which training in JAX needs": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}))",
        train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    "the optimizer 'bare' of plugin 'bad_plugin': rule = 'nowhere:rule': No module named 'nowhere'": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}, 'nowhere:rule'))",
        train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    "the optimizer 'bare' of plugin 'bad_plugin' has no row on torch's side; add it by torch_ref.register_optimizer": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}, 'nowhere:rule'))",
        torch_train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    "the family 'bare' of plugin 'bad_plugin' has no row on torch's side; add it by torch_ref.register_family": (
        f"{BARE}jaxdist.register_family(jaxdist.Family('bare', Bare, 'jaxdist.families.llama.model:Llama'))",
        torch_train.main, [*TRAIN, "--model.family", "bare"],
    ),
    "the optimizer 'alone' of plugin 'bad_plugin' has no row on torch's side; add it by torch_ref.register_optimizer": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('alone', {'m': ALL}, 'nowhere:rule'))",
        prove, [*TRAIN[:-4], "--steps", "9", *TRAIN[-2:], "--optimizer.name", "alone", "--output", "proof"],
    ),
    "the data source 'bare' of plugin 'bad_plugin': its open fails, ZeroDivisionError: division by zero": (
        "jaxdist.register_data_source(jaxdist.DataSource('bare', lambda data, model: 1 / 0))",
        train.main, [*TRAIN, "--data.source", "bare"],
    ),
    "the data source 'bare' of plugin 'bad_plugin': open returns 3; give an instance of jaxdist.data.dataset.Dataset": (
        "jaxdist.register_data_source(jaxdist.DataSource('bare', lambda data, model: 3))",
        train.main, [*TRAIN, "--data.source", "bare"],
    ),
    "the family 'bare' of plugin 'bad_plugin': its model fails, ZeroDivisionError: division by zero": (
        f"{BARE}jaxdist.register_family(jaxdist.Family('bare', Bare, lambda config: 1 / 0))",
        train.main, [*TRAIN, "--model.family", "bare"],
    ),
    "the family 'bare' of plugin 'bad_plugin': accounting = <class '.*; give an instance of .*forms.Accounting": (
        f"{BARE}from jaxdist.accounting.forms import Accounting\n"
        "row = jaxdist.Family('bare', Bare, 'jaxdist.families.llama.model:Llama', accounting=Accounting)\n"
        "jaxdist.register_family(row)",
        plan, ["--mesh", "1x1", "--plugins", "bad_plugin", "--model.family", "bare"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin': its recognizes fails, ZeroDivisionError: division by zero": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: 1 / 0))",
        convert, ["w.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin': find returns 3; give an instance of .*sources.Found": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: path.suffix == '.bare', "
        "lambda path, reader: 3))",
        convert, ["w.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
    "the data source 'bare' of plugin 'bad_plugin' has no open, which training needs": (
        "jaxdist.register_data_source(jaxdist.DataSource('bare'))",
        train.main, [*TRAIN, "--data.source", "bare"],
    ),
    "the optimizer 'bare' of plugin 'bad_plugin': its rule fails, TypeError: .*<lambda>": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}, lambda o, g: g))",
        train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    r"the optimizer 'bare' of plugin 'bad_plugin': rule returns float32\[2, 6, 4\], {} for the gradient ": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}, lambda o, g, state, step, p: (g, {})))",
        train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    "the optimizer 'bare' of plugin 'bad_plugin': its traffic fails, TypeError: 'int' object is not callable": (
        "jaxdist.register_optimizer(jaxdist.UpdateRule('bare', {'m': ALL}, lambda o, g, s, *a: (g, s), traffic=3))",
        train.main, [*TRAIN, "--optimizer.name", "bare"],
    ),
    "the data source 'bare' of plugin 'bad_plugin': its first row has numbers from 300 to 300; give rows": (
        f"{SEQUENCES}jaxdist.register_data_source(jaxdist.DataSource('bare', sequences))",
        torch_train.main, [*TRAIN, "--data.source", "bare"],
    ),
    "the data source 'bare' of plugin 'bad_plugin': its batch fails, RuntimeError: no network": (
        f"{SEQUENCES}class Broken(Sequences):\n    def batch(self, *a, **k): raise RuntimeError('no network')\n"
        "jaxdist.register_data_source(jaxdist.DataSource('bare', lambda d, m: sequences(d, m, Broken)))",
        train.main, [*TRAIN, "--data.source", "bare"],
    ),
    "the family 'bare' of plugin 'bad_plugin': its accounting fails, ZeroDivisionError: division by zero": (
        f"{BARE}from jaxdist.accounting.forms import Accounting\n"
        "row = jaxdist.Family('bare', Bare, 'jaxdist.families.llama.model:Llama', accounting=Accounting("
        "lambda *a: 1 / 0))\njaxdist.register_family(row)",
        train.main, [*TRAIN, "--model.family", "bare"],
    ),
    "the family 'bare' of plugin 'bad_plugin': its model has no config; keep the model section as self.config": (
        f"{BARE}from flax import nnx\njaxdist.register_family(jaxdist.Family('bare', Bare, lambda c: nnx.Module()))",
        train.main, [*TRAIN, "--model.family", "bare"],
    ),
    r"the family 'bare' of plugin 'bad_plugin': its parameter w \[3\] has the axes None; declare it with one": (
        f"{BARE}from flax import nnx\nimport numpy as np\nclass M(nnx.Module):\n    def __init__(self, c):\n"
        "        self.config, self.w = c, nnx.Param(np.ones(3))\n"
        "jaxdist.register_family(jaxdist.Family('bare', Bare, M))",
        plan, ["--mesh", "1x1", "--plugins", "bad_plugin", "--model.family", "bare"],
    ),
    "the family of torch_ref 'bare' of plugin 'bad_plugin': its model has no config; keep the model section as self": (
        f"{BARE}from torch import nn\njaxdist.register_family(jaxdist.Family('bare', Bare, 'a:b'))\n"
        "torch_ref.register_family(torch_ref.Family('bare', lambda c: nn.Linear(2, 2)))",
        build_in_torch, ["bare"],
    ),
    "^nowhere.bare: no such file or folder; give a run folder, ": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: 1 / 0))",
        convert, ["nowhere.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin' has no described in its module bad_plugin; add it": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: path.suffix == '.bare', "
        "module='bad_plugin'))",
        convert, ["w.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
    r"the kind of checkpoint 'bare' of plugin 'bad_plugin': find returns a Found with leaves\['w'\] = 3; give": (
        "from jaxdist.formats.sources import Found\n"
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: path.suffix == '.bare', "
        "lambda path, reader: Found(path, {'w': 3})))",
        convert, ["w.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin': its write fails, OSError: no tape": (
        f"{WRITTEN}def check(c): pass\ndef write(path, c):\n    path.touch()\n    raise OSError('no tape')",
        convert, ["SOURCE", "left.file", "--to", "bare", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin': write of its module wrote no file or folder; write it to": (
        f"{WRITTEN}def check(c): pass\ndef write(path, c): pass",
        convert, ["SOURCE", "left.file", "--to", "bare", "--plugins", "bad_plugin"],
    ),
    "--to: the kind of checkpoint 'bare' of plugin 'bad_plugin' has no naming, which writing it needs; register it": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', bool, bool))",
        convert, ["SOURCE", "bare.file", "--to", "bare", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin' has no check and write in its module, which --to needs": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', bool, bool, naming='huggingface'))",
        convert, ["SOURCE", "bare.file", "--to", "bare", "--plugins", "bad_plugin"],
    ),
    "the kind of checkpoint 'bare' of plugin 'bad_plugin' has no find, which reading it needs": (
        "jaxdist.register_checkpoint_kind(jaxdist.CheckpointKind('bare', 'file', lambda path: path.suffix == '.bare'))",
        convert, ["w.bare", "--inspect", "--plugins", "bad_plugin"],
    ),
}  # fmt: skip


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """bad(source): the package bad_plugin, in the folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bad_plugin", raising=False)

    def made(source: str) -> str:
        (tmp_path / "bad_plugin.py").write_text(f"{ROW}{source}\n", encoding="utf-8")
        return "bad_plugin"

    return made


@pytest.mark.parametrize("row", TAKEN)
def test_a_name_that_is_taken(row: str, bad: Package) -> None:
    with registered(), pytest.raises(ConfigError) as error:
        plugins.load_plugins([bad(TAKEN[row])])
    kind, _, name = row.rpartition(" ")
    assert str(error.value) == (
        f"plugin 'bad_plugin': bad_plugin registers the {kind} {name}, a name that jaxdist has taken; give it another "
        "name"
    )


@pytest.mark.long
@pytest.mark.parametrize("message", LACKING)
def test_a_piece_that_a_command_lacks(message: str, bad: Package, folder: Path, tmp_path: Path) -> None:
    source, main, arguments = LACKING[message]
    bad(source)
    (tmp_path / "w.bare").touch()
    given = [str(folder / "hf") if argument == "SOURCE" else argument for argument in arguments]
    with registered(), pytest.raises(ConfigError, match=message):
        main(given)
    assert not [*tmp_path.glob("*left.file*")] and not (tmp_path / "proof").exists()


def readme_code() -> list[str]:
    """Python of the README's section on plugins."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", readme.partition("## Plugins")[2].partition("\n## ")[0], re.DOTALL)


def test_the_readmes_rows_are_registered() -> None:
    with registered():
        exec("\n".join(readme_code()), {"__name__": "my_package"})
        owned = [{name for name in table if table.owner(name) == "my_package"} for table in TABLES]
        assert registry.FAMILIES["mine"].config.model_fields["rotated"].default == 4
    assert owned == [{"mine"}] * len(TABLES)


@pytest.mark.long
def test_a_full_disk_is_no_error_of_a_plugin(bad: Package, folder: Path) -> None:
    bad(f"{WRITTEN}def check(c): pass\ndef write(path, c): raise OSError(28, 'No space left on device')")
    with (
        registered(),
        pytest.raises(TrainingError, match=r"^TARGET full could not be written: .*No space"),
    ):
        convert([str(folder / "hf"), "full", "--to", "bare", "--plugins", "bad_plugin"])


@pytest.mark.long
def test_the_readmes_rows_import_neither_jax_nor_torch(tmp_path: Path) -> None:
    """Nor does the toy's package, which a process imports in which neither can be."""
    (tmp_path / "rows.py").write_text("\n".join(readme_code()), encoding="utf-8")
    blocked = "import sys\nsys.modules |= dict.fromkeys(('jax', 'torch', 'flax', 'orbax'))\n"
    path = os.pathsep.join(map(str, (tmp_path, TOY, TOY.parents[2])))
    for packages, code in (("rows, toy_plugin", 0), ("jax", 1), ("torch", 1)):
        line = [sys.executable, "-c", f"{blocked}import {packages}"]
        assert subprocess.run(line, env={"PYTHONPATH": path}, stderr=subprocess.DEVNULL).returncode == code


def test_an_impossible_strategy() -> None:
    with pytest.raises(ConfigError, match="strategy 'odd': parameters or gradients are sharded and the optimizer"):
        strategies.Strategy("odd", parameters=True, gradients=False, optimizer=False)
    with pytest.raises(ConfigError, match="strategy 'odd': reshards=True without sharded parameters"):
        strategies.Strategy("odd", parameters=False, gradients=True, optimizer=True, reshards=True)


@pytest.mark.long
def test_exit_code_and_one_message(bad: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad("raise RuntimeError('no licence for this machine')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = command("jaxdist.plan", "--plugins", "bad_plugin")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: plugin 'bad_plugin': its import fails, RuntimeError: no licence for this machine (")
