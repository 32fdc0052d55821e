"""A PyTorch loop of one's own that leaves a run folder; the lines that the proof needs end in `# <-`.

python -m parity_tests.examples.own_loop CONFIG.toml HF_FOLDER RUN_DIR
python -m parity_tests --against RUN_DIR --init HF_FOLDER --output PROOF
"""

import math
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from jaxdist.config import RunFolder, load
from jaxdist.data import IGNORED, open_dataset

experiment = load(sys.argv[1], {})  # <- what the run is to be compared with
data = open_dataset(experiment.data, experiment.model.vocab)  # <- the same batches
folder = RunFolder(Path(sys.argv[3]), experiment)  # <-
folder.create(experiment.on_data(data.fingerprint))  # <-

train, o = experiment.train, experiment.optimizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32).eval()
names, parameters = zip(*model.named_parameters(), strict=True)
decay, other = ([p for p in parameters if (p.ndim >= 2) == matrix] for matrix in (True, False))
groups = [{"params": decay, "weight_decay": o.weight_decay}, {"params": other, "weight_decay": 0.0}]
adam = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps)
for step in range(1, train.steps + 1):
    cosine = (1 + math.cos(math.pi * (step - o.warmup) / (train.steps - o.warmup))) / 2
    rate = o.learning_rate * (step / o.warmup if step <= o.warmup else o.final + (1 - o.final) * cosine)
    for group in adam.param_groups:
        group["lr"] = rate
    tokens, targets = (torch.from_numpy(x).long() for x in data.batch(step, train.batch, train.seed))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    adam.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, o.clip)
    adam.step()
    folder.log({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate})  # <-

states = {f"weights/{n}": p for n, p in zip(names, parameters, strict=True)}  # <-
for kind in ("exp_avg", "exp_avg_sq"):  # <-
    states |= {f"{kind}/{n}": adam.state[p][kind] for n, p in zip(names, parameters, strict=True)}  # <-
folder.record(train.steps, {name: t.detach().numpy() for name, t in states.items()})  # <-
