"""llm.c's model files and states: offsets of tensors, masters in place of bfloat16, and refusals."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxdist.command_line.arguments import load
from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.kinds.formats_test import tensors
from jaxdist.convert.weights import source_experiment
from jaxdist.formats import llmc_files
from jaxdist.formats.foreign import SINGLE

L, H, D, V, T = 3, 2, 8, 17, 6
ROWS = 20  # the last 3 are padding
SHAPES: dict[str, tuple[int, ...]] = {
    "wte": (ROWS, D), "wpe": (T, D), "ln1w": (L, D), "ln1b": (L, D), "qkvw": (L, 3 * D, D), "qkvb": (L, 3 * D),
    "attprojw": (L, D, D), "attprojb": (L, D), "ln2w": (L, D), "ln2b": (L, D), "fcw": (L, 4 * D, D),
    "fcb": (L, 4 * D), "fcprojw": (L, D, 4 * D), "fcprojb": (L, D), "lnfw": (D,), "lnfb": (D,),
}  # fmt: skip


def drawn(seed: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def write(path: Path, header: dict[int, int], *groups: dict[str, np.ndarray]) -> None:
    numbers = np.zeros(256, np.int32)
    for place, value in header.items():
        numbers[place] = value
    path.write_bytes(numbers.tobytes() + b"".join(a.tobytes() for group in groups for a in group.values()))


def model(path: Path, version: int = 3, **more: Any) -> dict[str, np.ndarray]:
    weights = drawn(0, {3: np.float32, 5: ml_dtypes.bfloat16}.get(version, np.float32))
    write(path, {0: 20240326, 1: version, 2: T, 3: V, 4: L, 5: H, 6: D, 7: ROWS}, weights)
    return weights


def state(path: Path, *groups: dict[str, np.ndarray], processes: int = 1) -> None:
    write(path, {0: 20240527, 1: 1, 2: processes, 4: int(len(groups) > 2), 10: 40}, *groups)


def same(found: Any, group: str, right: dict[str, np.ndarray]) -> None:
    for layer in range(L):
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            dtype, shape, there = found[group, f"layers.attention.{name}.kernel[{layer}]"]
            part = right["qkvw"][layer, i * D : (i + 1) * D]
            assert np.array_equal(np.frombuffer(there, dtype).reshape(shape).T, part)
        dtype, shape, there = found[group, f"layers.mlp.down_proj.kernel[{layer}]"]
        assert np.array_equal(np.frombuffer(there, dtype).reshape(shape).T, right["fcprojw"][layer])
        assert found[group, f"layers.mlp_norm.bias[{layer}]"][2] == right["ln2b"][layer].tobytes()
    assert found[group, "embed.embedding"][2] == right["wte"].tobytes()
    assert found[group, "norm.bias"][2] == right["lnfb"].tobytes()


@pytest.mark.parametrize("version", [3, 5])
def test_a_model(version: int, tmp_path: Path) -> None:
    right = model(tmp_path / "gpt2.bin", version)
    main([str(tmp_path / "gpt2.bin"), str(tmp_path / "run")])
    same(tensors(tmp_path / "run"), "parameters", right)
    m: Any = load(tmp_path / "run" / "config.toml", {}).model
    assert (m.gelu, m.bias, m.vocab, m.layers, m.heads, m.hidden, m.tied) == ("tanh", True, V, L, H, 4 * D, True)
    assert m.vocab_rows == ROWS


@pytest.mark.parametrize(
    ("tokens", "rows", "multiple"), [(17, 20, 20), (17, 17, 1), (17, 128, 128), (130, 256, 128), (256, 256, 1)]
)
def test_padding_is_no_token(tokens: int, rows: int, multiple: int, tmp_path: Path) -> None:
    """Padding is neither in the model's distribution nor exported; tokens are unchanged."""
    file, random = tmp_path / "gpt2.bin", np.random.default_rng(0)
    shapes = SHAPES | {"wte": (rows, D)}
    right = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    write(file, {0: 20240326, 1: 3, 2: T, 3: tokens, 4: L, 5: H, 6: D, 7: rows}, right)
    main([str(file), str(tmp_path / "hf"), "--to", "hf"])
    table = load_file(tmp_path / "hf" / SINGLE)["transformer.wte.weight"]
    assert np.array_equal(table, right["wte"][:tokens])
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == tokens
    model: Any = source_experiment(file).model
    assert (model.vocab, model.vocab_rows, model.vocab_multiple) == (tokens, rows, multiple)


def test_the_vocabulary_of_gpt2(tmp_path: Path) -> None:
    assert llmc_files._multiple(tmp_path, 50257, 50304) == 128


@pytest.mark.long
def test_moments_and_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """States of other processes are named as left behind."""
    weights = model(tmp_path / "model_00000040.bin", 5)
    m, v, masters = drawn(1), drawn(2), drawn(3)
    v = {name: np.abs(array) for name, array in v.items()}
    state(tmp_path / "state_00000040_00000.bin", m, v, masters)
    main([str(tmp_path / "model_00000040.bin"), str(tmp_path / "run")])
    found = tensors(tmp_path / "run")
    for group, right in (("parameters", masters), ("exp_avg", m), ("exp_avg_sq", v)):
        same(found, group, right)
    assert found["", "steps"] == (40, 40)
    state(tmp_path / "state_00000040_00000.bin", m, v, masters, processes=2)
    main([str(tmp_path / "model_00000040.bin"), str(tmp_path / "two")])
    assert "the moments of state_00000040_00000.bin, which 2 processes shared" in capsys.readouterr().out
    same(tensors(tmp_path / "two"), "parameters", weights)


def test_other_files_of_llmc_are_refused(tmp_path: Path) -> None:
    """The message's fix, the model file, works."""
    file, state_file = tmp_path / "model_00000040.bin", tmp_path / "state_00000040_00000.bin"
    model(file)
    state(state_file, drawn(1), {n: np.abs(a) for n, a in drawn(2).items()})
    intact = file.read_bytes()
    with pytest.raises(ConfigError, match=r"is an optimizer's state of llm.c's; give the model_\*.bin"):
        main([str(state_file), str(tmp_path / "run")])
    main([str(file), str(tmp_path / "run")])
    for change, message in (
        (intact[:-4], r"has [\d,]+ bytes, where its header says"),
        (intact + b"1234", r"has [\d,]+ bytes, where its header says"),
        (intact[:4] + (7).to_bytes(4, "little") + intact[8:], "version 7 of llm.c's model files; give one of 3, 5"),
        (intact[:20] + (3).to_bytes(4, "little") + intact[24:], "model.heads = 3 does not divide model.dim = 8"),
        (intact[:12] + (21).to_bytes(4, "little") + intact[16:], "header has 21 tokens in 20 rows, padding among them"),
        (intact[:12] + bytes(4) + intact[16:], "header has 0 tokens in 20 rows"),
        (intact[:100], "bytes early; use an intact copy"),
    ):
        file.write_bytes(change)
        with pytest.raises(ConfigError, match=message):
            main([str(file), str(tmp_path / "other")])
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("magic", "title"), [(20240803, "Llama 3 checkpoint"), (20240328, "tokenizer")])
def test_other_files_of_llm_c_are_named(magic: int, title: str, tmp_path: Path) -> None:
    np.array([magic, 3, *[0] * 254], np.int32).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=rf"a.bin is llm.c's {title}, which is not read; give its GPT-2's model_"):
        main([str(tmp_path / "a.bin"), str(tmp_path / "run")])
