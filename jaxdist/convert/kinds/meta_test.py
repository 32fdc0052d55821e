"""Meta's layout: converted weights give the logits of Meta's own arithmetic with complex rotations."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.config import ConfigError
from jaxdist.convert.__main__ import main
from jaxdist.convert.content import Leaf
from jaxdist.convert.convert_test import SMALL
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds import meta
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.verify import logits
from jaxdist.families.llama.config import Llama
from jaxdist.formats import meta as formats_meta
from jaxdist.formats.hf import experiment_for

torch = pytest.importorskip("torch")

MODEL = Llama(**{**SMALL, "head_dim": 4, "dim": 16, "hidden": 24, "norm_eps": 1e-5, "rope_theta": 500000.0})
PARAMS = {
    "dim": 16, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "norm_eps": 1e-5, "multiple_of": 8,
    "rope_theta": 500000.0,
}  # fmt: skip


def drawn() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    shapes = {name: entry.shape for name, entry in entries("meta", MODEL).items()}
    return {n: torch.randn(s, generator=random) / math.sqrt(s[-1]) for n, s in shapes.items()}


def saved(folder: Path, ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(PARAMS))
    for i, weights in enumerate(ranks):
        torch.save(weights | {"rope.freqs": torch.ones(2)}, folder / f"consolidated.{i:02}.pth")
    return folder


@pytest.mark.parametrize(
    ("dim", "more", "factor"),
    [(4096, {}, 8), (2048, {}, 32), (3072, {}, 32), (2048, {"rope_scaling_factor": 16}, 16), (16384, {}, 8)],
)
def test_the_factor_of_the_rotation(dim: int, more: dict[str, Any], factor: float, tmp_path: Path) -> None:
    """Llama 3.2 has the same settings as Llama 3.1, but another factor."""
    (tmp_path / "params.json").write_text(json.dumps(PARAMS | {"dim": dim, "use_scaled_rope": True} | more))
    shapes = {"layers.0.feed_forward.w1.weight": (24, dim), "tok_embeddings.weight": (128, dim)}
    values = formats_meta._model(
        tmp_path, [{n: Leaf(s, np.dtype("float32"), lambda: np.empty(0)) for n, s in shapes.items()}]
    )
    assert (values["rope_scaling"], values["rope_factor"]) == ("llama3", factor)


def reference(w: dict[str, Any], tokens: Any, interleaved: bool = True) -> Any:
    """Forward pass that rotates neighbouring pairs of a head's numbers as complex numbers: [B, T, V]."""
    H, K, C = MODEL.heads, MODEL.kv_heads, MODEL.head_dim
    B, T = tokens.shape
    angles = torch.outer(torch.arange(T), MODEL.rope_theta ** (-torch.arange(0, C, 2) / C))
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def rotated(x: Any) -> Any:
        pairs = x.reshape(*x.shape[:-1], C // 2, 2) if interleaved else x.reshape(*x.shape[:-1], 2, C // 2).mT
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
        return (turned if interleaved else turned.mT).reshape(x.shape)

    def norm(x: Any, name: str) -> Any:
        return x / (x.pow(2).mean(-1, keepdim=True) + MODEL.norm_eps).sqrt() * w[name]

    x = w["tok_embeddings.weight"][tokens]
    for i in range(MODEL.layers):
        p = f"layers.{i}."
        h = norm(x, p + "attention_norm.weight")
        q, k, v = (h @ w[f"{p}attention.w{n}.weight"].T for n in "qkv")
        q, k = rotated(q.reshape(B, T, H, C)), rotated(k.reshape(B, T, K, C)).repeat_interleave(H // K, 2)
        v = v.reshape(B, T, K, C).repeat_interleave(H // K, 2)
        scores = torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(C)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        x = x + torch.einsum("bhts,bshc->bthc", scores, v).reshape(B, T, H * C) @ w[p + "attention.wo.weight"].T
        h = norm(x, p + "ffn_norm.weight")
        gate, up = (h @ w[f"{p}feed_forward.w{n}.weight"].T for n in "13")
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T


def apart(folder: Path, interleaved: bool = True) -> float:
    """Largest difference of logits from the reference, over the largest logit."""
    tokens = np.random.default_rng(0).integers(MODEL.vocab, size=(2, 16), dtype=np.int32)
    content = KINDS["meta"].format.read_content(folder)
    ours = logits(content, tokens)
    right = reference(drawn(), torch.from_numpy(tokens).long(), interleaved).numpy()
    return float(np.abs(ours - right).max() / np.abs(right).max())


@pytest.mark.long
def test_logits_are_those_of_metas_arithmetic(tmp_path: Path) -> None:
    folder = saved(tmp_path / "meta", [drawn()])
    assert apart(folder) < 1e-5  # float32, 3 layers: measured 4e-7
    assert apart(folder, interleaved=False) > 1e-2


def test_pieces_of_ranks_are_put_together(tmp_path: Path) -> None:
    """Two ranks, split as Llama 2: embeddings by width, others by outputs or inputs."""

    def piece(name: str, tensor: Any, rank: int) -> Any:
        if tensor.ndim == 1:
            return tensor
        axis = 1 if name.split(".")[-2] in ("tok_embeddings", "wo", "w2") else 0
        return tensor.chunk(2, axis)[rank] if tensor.shape[axis] % 2 == 0 else tensor.tensor_split(2, axis)[rank]

    one = saved(tmp_path / "one", [drawn()])
    two = saved(tmp_path / "two", [{n: piece(n, t, rank) for n, t in drawn().items()} for rank in (0, 1)])
    for folder in (one, two):
        main([str(folder), str(tmp_path / f"{folder.name} hf"), "--to", "hf"])
    first, second = ((tmp_path / f"{name} hf" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert first == second
    one_listed, two_listed = ({n: leaf.shape for n, leaf in meta.described(folder).items()} for folder in (one, two))
    assert one_listed == two_listed


def test_the_way_back_to_its_own_names(tmp_path: Path) -> None:
    folder = saved(tmp_path / "meta", [drawn()])
    torch.save(drawn(), folder / "alone.pth")
    config = tmp_path / "model.toml"
    config.write_text(experiment_for(MODEL.model_dump(), "test").to_toml())
    main([str(folder / "alone.pth"), str(tmp_path / "run"), "--model", str(config)])
    main([str(tmp_path / "run"), str(tmp_path / "back.pth")])
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert back.keys() == drawn().keys() and all(torch.equal(back[name], tensor) for name, tensor in drawn().items())


@pytest.mark.parametrize(
    "change", [{"dim": None}, {"n_heads": 0}, {"n_heads": "four"}, {"norm_eps": -1}, {"n_layers": 10**9}], ids=str
)
def test_params_that_cannot_be(change: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(tmp_path / "meta", [drawn()])
    (folder / "params.json").write_text(json.dumps(PARAMS | change))
    with pytest.raises(ConfigError, match=r"params.json"):
        main([str(folder), str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["dim", "n_heads", "n_layers", "n_kv_heads"])
def test_a_number_beyond_all(key: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "meta", [drawn()])
    (folder / "params.json").write_text(json.dumps(PARAMS).replace(f'"{key}": {PARAMS[key]}', f'"{key}": 1e400'))
    with pytest.raises(ConfigError, match=r"params.json: .*give the folder that Meta published"):
        meta.read_content(folder)


@pytest.mark.parametrize("other", [None, (), (7 * 16,), (7, 16, 1), (3, 15)])
def test_ranks_that_do_not_fit(other: Any, tmp_path: Path) -> None:
    """The second rank lacks a tensor, or has another shard than the first's tensor needs."""
    first = drawn() | {"output.weight": torch.ones(3, 16)}
    second = drawn() | {"output.weight": torch.ones(other or ())}
    if other is None:
        del second["output.weight"]
    with pytest.raises(
        ConfigError, match=r"of output.weight its 2 consolidated.\*.pth have .*give the complete folder"
    ):
        meta.read_content(saved(tmp_path / "meta", [first, second]))


def test_its_listing_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Assumptions are reported on standard error."""
    folder = saved(tmp_path / "meta", [drawn()])
    (folder / "params.json").write_text(json.dumps(PARAMS | {"use_scaled_rope": True}))
    main(["--inspect", str(folder), "--json"])
    captured = capsys.readouterr()
    assert json.loads(captured.out)["kind"] == "meta"
    assert "its rotation is taken to be stretched by" in captured.err
    main(["--inspect", str(folder)])
    captured = capsys.readouterr()
    assert "its rotation is taken to be stretched by" in captured.out and not captured.err


def test_its_tokenizer_goes_along(tmp_path: Path) -> None:
    folder = saved(tmp_path / "meta", [drawn()])
    (folder / "tokenizer.model").write_bytes(b"pieces")
    main([str(folder), str(tmp_path / "hf"), "--to", "hf"])
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"pieces"
