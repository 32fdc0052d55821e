"""A loop like nanoGPT's train.py, which saves its ckpt.pt and leaves a run folder; the lines for the proof end in `#
<-`.

python -m parity_tests.examples.nanogpt CONFIG.toml OUT_DIR RUN_DIR
python -m jaxdist.convert OUT_DIR/ckpt.pt RUN
python -m parity_tests --against RUN_DIR --init OUT_DIR/init.pt --output PROOF
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from jaxdist.command_line.arguments import load
from jaxdist.data import dataset_of, in_steps
from jaxdist.runs.folder import RunFolder
from parity_tests.examples.command import PLAIN, check, example

SAVED = 3  # ckpt.pt is saved before this iteration
NANOGPT: dict[str, tuple[Any, ...]] = {  # values that nanoGPT's model and loop implement
    "optimizer.decay": ("cosine",),
    "precision.policy": ("fp64",),
    "model.gelu": ("exact",),
    "model.tied": (True,),
    "model.norm_eps": (1e-5,),
}


class LayerNorm(nn.Module):
    """LayerNorm with or without a bias."""

    def __init__(self, size: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, size: int, heads: int, bias: bool):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(size, 3 * size, bias), nn.Linear(size, size, bias)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).split(D, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, D))  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, size: int, bias: bool):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(size, 4 * size, bias), nn.Linear(4 * size, size, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, size: int, heads: int, bias: bool):
        super().__init__()
        self.ln_1, self.attn = LayerNorm(size, bias), Attention(size, heads, bias)
        self.ln_2, self.mlp = LayerNorm(size, bias), MLP(size, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's model, from its `model_args`."""

    def __init__(self, n_layer: int, n_head: int, n_embd: int, block_size: int, bias: bool, vocab_size: int, **_: Any):
        super().__init__()
        parts: dict[str, nn.Module] = {
            "wte": nn.Embedding(vocab_size, n_embd), "wpe": nn.Embedding(block_size, n_embd),
            "h": nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer)), "ln_f": LayerNorm(n_embd, bias),
        }  # fmt: skip
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for p in self.parameters():
            if p.ndim >= 2:
                nn.init.normal_(p, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        t = self.transformer
        x = t["wte"](tokens) + t["wpe"](torch.arange(tokens.shape[1]))
        for block in t["h"]:  # type: ignore[attr-defined]
            x = block(x)
        return self.lm_head(t["ln_f"](x))  # type: ignore[no-any-return]


@example(__doc__, "CONFIG.toml", "OUT_DIR", "RUN_DIR")
def main(config: Path, out: Path, run: Path) -> None:
    experiment = in_steps(load(config, {}))  # <- what the run is to be compared with
    check(experiment, {"model.family": ("gpt2",)})
    m: Any = experiment.model
    check(experiment, PLAIN | NANOGPT | {"model.hidden": (4 * m.dim,)})
    out.mkdir(parents=True, exist_ok=True)
    data = dataset_of(experiment)  # <- the same batches
    folder = RunFolder(run, experiment)  # <-
    folder.create(experiment.on_data(data.fingerprint))  # <-
    train, o = experiment.train, experiment.optimizer
    arguments: dict[str, Any] = {
        "n_layer": m.layers,
        "n_head": m.heads,
        "n_embd": m.dim,
        "block_size": m.positions,
        "bias": m.bias,
    }
    arguments |= {"vocab_size": m.vocab, "dropout": 0.0}
    settings: dict[str, Any] = {
        "learning_rate": o.learning_rate, "max_iters": train.steps, "batch_size": train.batch, "grad_clip": o.clip,
        "gradient_accumulation_steps": 1, "decay_lr": True, "warmup_iters": o.warmup - 1, "dtype": "float64",
        "lr_decay_iters": (o.decay_steps or train.steps) - 1, "min_lr": o.final * o.learning_rate,
    }  # fmt: skip

    def get_lr(it: int) -> float:
        warmup, end, least = (settings[key] for key in ("warmup_iters", "lr_decay_iters", "min_lr"))
        if it < warmup:
            return float(o.learning_rate * (it + 1) / (warmup + 1))
        coefficient = 0.5 * (1 + math.cos(math.pi * min(1, (it - warmup) / max(1, end - warmup))))
        return float(least + coefficient * (o.learning_rate - least))

    torch.manual_seed(train.seed)
    model = GPT(**arguments).double()
    parameters = list(model.parameters())
    decayed, others = ([p for p in parameters if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps)

    def save(name: str, it: int) -> None:
        state = {f"_orig_mod.{n}": tensor for n, tensor in model.state_dict().items()}
        saved = {"model": state, "optimizer": adam.state_dict(), "model_args": arguments, "iter_num": it}
        torch.save(saved | {"best_val_loss": torch.tensor(1e9), "config": settings}, out / name)

    for it in range(train.steps):
        for group in adam.param_groups:
            group["lr"] = get_lr(it)
        if it in (0, SAVED):
            save("ckpt.pt" if it else "init.pt", it)
        tokens, targets = (torch.from_numpy(x).long() for x in data.batch(it + 1, train.batch, train.seed))
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, o.clip or math.inf)
        adam.step()
        adam.zero_grad(set_to_none=True)
        folder.log({"step": it + 1, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": get_lr(it)})  # <-

    kept = {n: {"weights": p.detach(), **adam.state[p]} for n, p in model.named_parameters()}  # <-
    tensors = {f"{k}/{n}": t.numpy() for n, s in kept.items() for k, t in s.items() if t.ndim}  # <-
    folder.record(train.steps, tensors)  # <-
