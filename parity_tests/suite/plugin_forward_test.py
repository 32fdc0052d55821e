"""Errors in a plugin family's forward pass: one message with the plugin, the family and its own lines."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxdist import train
from jaxdist.config import ConfigError
from jaxdist.conftest import free_port
from jaxdist.evaluate import main as evaluate
from jaxdist.plan import main as plan
from parity_tests.suite.plugins_test import registered
from torch_ref import train as torch_train

pytestmark = pytest.mark.long

PLUGIN = """
from typing import Literal
import jaxdist
import torch_ref
from jaxdist.families.llama.config import Llama as Config

class Broken(Config):
    family: Literal["broken"] = "broken"

jaxdist.register_family(jaxdist.Family("broken", Broken, "broken_plugin.jax_model:Broken"))
torch_ref.register_family(torch_ref.Family("broken", "broken_plugin.torch_model:Broken"))
"""
JAX = """
import os
import jax.numpy as jnp
from jaxdist.families.llama.model import Llama

class Broken(Llama):
    def __call__(self, par, tokens_BT, *more, **extra):
        return self.wrong(super().__call__(par, tokens_BT, *more, **extra))

    def wrong(self, y):
        {statement}
        return y
"""
TORCH = """
import os
import torch
from torch_ref.families.llama import Llama

class Broken(Llama):
    def forward(self, tokens_BT, **extra):
        return self.wrong(super().forward(tokens_BT, **extra))

    def wrong(self, y):
        {statement}
        return y
"""
SIZES = shlex.split(
    "--plugins broken_plugin --model.family broken --model.layers 1 --model.dim 8 --model.heads 2 --model.kv_heads 2 "
    "--model.head_dim 4 --model.hidden 8 --model.vocab 256 --model.positions 8 --data.sequence 8 --train.batch 2"
)
TRAIN = [*SIZES, *shlex.split("--device cpu --mesh 1x1 --steps 1 --train.validation_batches 0")]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """package(jax, torch): a plugin whose forward passes run these statements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_plugin").mkdir()
    (np.arange(999, dtype=np.uint16) % 5).tofile(tmp_path / "ids.bin")

    def written(jax: str = "pass", torch: str = "pass") -> None:
        for name, text in {"__init__": PLUGIN, "jax_model": JAX, "torch_model": TORCH}.items():
            statement = jax if name == "jax_model" else torch
            file = tmp_path / "broken_plugin" / f"{name}.py"
            file.write_text(text.replace("{statement}", statement), encoding="utf-8")

    with registered():
        yield written
    for name in [name for name in sys.modules if name.startswith("broken_plugin")]:
        del sys.modules[name]


def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCH_REF_STORE"):
        monkeypatch.delenv(name, raising=False)


def data(tmp_path: Path) -> list[str]:
    return ["--data.path", str(tmp_path / "ids.bin"), "--data.bin_dtype", "uint16"]


SAYS = (
    r"^the family (of torch_ref )?'broken' of plugin 'broken_plugin': its model fails, {error}.* "
    r"\(\S*/broken_plugin/{file}.py, line 8, then \S*/broken_plugin/{file}.py, line 11\); correct it, or use another"
)
WRONG = {
    "a shape": ("y @ jnp.ones((3, 5))", "y @ torch.ones(3, 5)", "(TypeError|RuntimeError): "),
    "an attribute": ("self.nothing", "self.nothing", "AttributeError: '.*' object has no attribute 'nothing'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_training_in_jax(wrong: str, package: Callable[..., None], tmp_path: Path) -> None:
    statement, _, error = WRONG[wrong]
    package(jax=statement)
    with pytest.raises(ConfigError, match=SAYS.format(error=error, file="jax_model")):
        train.main([*TRAIN, *data(tmp_path)])


OUTPUTS = {  # statements in JAX and in torch -> what the message says
    "nothing": ("return", "return", "None( without a gradient)?"),
    "fewer columns": ("return y[..., :7]", "return y[..., :7] * 1", r"(torch\.)?float32\[2, 8, 7\]"),
    "integers": ("return y.astype(int)", "return y.int()", r"(int|torch\.int)32\[2, 8, 256\]( without a gradient)?"),
    "constants": ("return y.sum()", "return y.detach()", r"(torch\.)?float32\[(2, 8, 256)?\]( without a gradient)?"),
}


@pytest.mark.parametrize("side", [0, 1], ids=["jax", "torch"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_other_outputs_than_logits(
    side: int, output: str, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements, said = OUTPUTS[output][:2], OUTPUTS[output][2]
    package(*(statement if i == side else "pass" for i, statement in enumerate(statements)))
    one_rank(monkeypatch)
    with pytest.raises(
        ConfigError,
        match=rf"'broken' of plugin 'broken_plugin': model returns {said}; return floating numbers \[2, 8, 256\]",
    ):
        (torch_train if side else train).main([*TRAIN, *data(tmp_path)])


def test_a_compiled_plan(package: Callable[..., None], tmp_path: Path) -> None:
    package(jax="self.nothing")
    with pytest.raises(ConfigError, match=SAYS.format(error="AttributeError", file="jax_model")):
        plan([*SIZES, "--mesh", "1x1", "--compiled"])


def test_evaluation(package: Callable[..., None], tmp_path: Path) -> None:
    package(jax="if os.environ.get('BROKEN'): self.nothing")
    train.main([*TRAIN, *data(tmp_path), "--train.steps", "0", "--output", "run"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        patch.setenv("BROKEN", "1")
        evaluate(["--checkpoint", "run", "--data", str(tmp_path / "ids.bin"), "--device", "cpu"])
    assert re.search(SAYS.format(error="AttributeError", file="jax_model"), str(error.value))


@pytest.mark.parametrize("wrong", WRONG)
def test_training_in_torch(
    wrong: str, package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, statement, error = WRONG[wrong]
    package(torch=statement)
    one_rank(monkeypatch)
    with pytest.raises(ConfigError, match=SAYS.format(error=error, file="torch_model")):
        torch_train.main([*TRAIN, *data(tmp_path)])


def test_an_error_of_a_collective_stays_one(
    package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(torch="raise RuntimeError('[gloo/transport/tcp/pair.cc:553] Connection closed by peer')")
    one_rank(monkeypatch)
    with pytest.raises(SystemExit) as ended:
        torch_train.main([*TRAIN, *data(tmp_path)])
    assert ended.value.code == 1


def test_a_loss_in_chunks_without_logits(
    package: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package()
    (tmp_path / "broken_plugin/torch_model.py").write_text(
        "from torch_ref.families.llama import Llama\n\nclass Broken(Llama):\n    def __init__(self, c):\n"
        "        super().__init__(c)\n        del self.logits\n"
    )
    one_rank(monkeypatch)
    with pytest.raises(ConfigError) as error:
        torch_train.main([*TRAIN, *data(tmp_path), "--memory.loss_chunks", "2"])
    assert str(error.value) == (
        "the family of torch_ref 'broken' of plugin 'broken_plugin': its model has no logits = nn.Identity(), through "
        "which those of a loss in chunks pass; add it, or set memory.loss_chunks = 1"
    )
    one_rank(monkeypatch)
    torch_train.main([*TRAIN, *data(tmp_path), "--memory.loss_chunks", "1"])
