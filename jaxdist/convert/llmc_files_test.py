"""llm.c's model files and states: each tensor from its place, masters in place of bfloat16, and what is refused."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.config.arguments import load
from jaxdist.convert.__main__ import main
from jaxdist.convert.formats_test import tensors

L, H, D, V, T = 3, 2, 8, 20, 6
SHAPES: dict[str, tuple[int, ...]] = {
    "wte": (V, D), "wpe": (T, D), "ln1w": (L, D), "ln1b": (L, D), "qkvw": (L, 3 * D, D), "qkvb": (L, 3 * D),
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
    write(path, {0: 20240326, 1: version, 2: T, 3: V - 3, 4: L, 5: H, 6: D, 7: V}, weights)
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


def test_moments_and_masters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one process; those of several are named as left behind."""
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


def test_what_is_refused(tmp_path: Path) -> None:
    """And giving the model file, as the message says, leads on."""
    file, beside = tmp_path / "model_00000040.bin", tmp_path / "state_00000040_00000.bin"
    model(file)
    state(beside, drawn(1), drawn(2))
    whole = file.read_bytes()
    with pytest.raises(ConfigError, match=r"is an optimizer's state of llm.c's; give the model_\*.bin"):
        main([str(beside), str(tmp_path / "run")])
    main([str(file), str(tmp_path / "run")])
    for change, says in (
        (whole[:-4], r"has [\d,]+ bytes, where its header says"),
        (whole + b"1234", r"has [\d,]+ bytes, where its header says"),
        (whole[:4] + (7).to_bytes(4, "little") + whole[8:], "version 7 of llm.c's model files; give one of 3, 5"),
        (whole[:20] + (3).to_bytes(4, "little") + whole[24:], "model.heads = 3 does not divide model.dim = 8"),
        (whole[:100], "bytes early; use a whole copy"),
    ):
        file.write_bytes(change)
        with pytest.raises(ConfigError, match=says):
            main([str(file), str(tmp_path / "other")])
        assert not (tmp_path / "other").exists()
