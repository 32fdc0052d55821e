"""A PyTorch loop of one's own that leaves a run folder; the lines that the proof needs end in `# <-`.

python -m parity_tests.examples.own_loop CONFIG.toml HF_FOLDER RUN_DIR
python -m parity_tests --against RUN_DIR --init HF_FOLDER --output PROOF
"""

import math

import torch
from transformers import AutoModelForCausalLM

from jaxdist.command_line.arguments import load, positional
from jaxdist.data import IGNORED, dataset_of
from jaxdist.runs.folder import RunFolder

config, start, run = positional(__doc__, "CONFIG.toml", "HF_FOLDER", "RUN_DIR")
experiment = load(config, {})  # <- what the run is to be compared with
data = dataset_of(experiment)  # <- the same batches
folder = RunFolder(run, experiment)  # <-
folder.create(experiment.on_data(data.fingerprint))  # <-

train, o = experiment.train, experiment.optimizer
model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
parameters = list(model.parameters())
matrices = {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o.weight_decay}
groups = [matrices, {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
adam = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps)
for step in range(1, train.steps + 1):
    cosine = (1 + math.cos(math.pi * (step - o.warmup) / (train.steps - o.warmup))) / 2
    rate = o.learning_rate * (step / o.warmup if step <= o.warmup else o.final + (1 - o.final) * cosine)
    adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = rate
    tokens, targets = (torch.from_numpy(x).long() for x in data.batch(step, train.batch, train.seed))
    loss = torch.nn.functional.cross_entropy(model(tokens).logits.mT, targets, ignore_index=IGNORED)
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, o.clip)
    adam.step()
    folder.log({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate})  # <-

kept = {n: {"weights": p.detach(), **adam.state[p]} for n, p in model.named_parameters()}  # <-
folder.record(train.steps, {f"{k}/{n}": t.numpy() for n, s in kept.items() for k, t in s.items() if t.ndim})  # <-
