"""A user's PyTorch loop that leaves a run folder; the lines for the proof end in `# <-`.

python -m parity_tests.examples.own_loop CONFIG.toml HF_FOLDER RUN_DIR
python -m parity_tests --against RUN_DIR --init HF_FOLDER --output PROOF
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from jaxdist.data import IGNORED, dataset_of
from jaxdist.runs.folder import RunFolder
from parity_tests.examples.command import example, in_dtype, supported
from torch_ref.training.optim import learning_rate


@example(__doc__, "CONFIG.toml", "HF_FOLDER", "RUN_DIR")
def main(config: Path, start: Path, run: Path) -> None:
    experiment = supported(config, start)  # <- what the run is to be compared with
    data = dataset_of(experiment)  # <- the same batches
    folder = RunFolder(run, experiment)  # <-
    folder.create(experiment.on_data(data.fingerprint))  # <-

    train, o = experiment.train, experiment.optimizer
    with in_dtype(experiment) as dtype:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=dtype).eval()
        matrices = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": o.weight_decay}
        groups = [matrices, {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        adam = torch.optim.AdamW(groups, lr=o.learning_rate, betas=(o.beta1, o.beta2), eps=o.eps)
        for step in range(1, train.steps + 1):
            adam.param_groups[0]["lr"] = adam.param_groups[1]["lr"] = rate = learning_rate(o, train.steps, step)
            tokens, targets = (torch.from_numpy(x).long() for x in data.batch(step, train.batch, train.seed))
            loss = torch.nn.functional.cross_entropy(model(tokens).logits.mT, targets, ignore_index=IGNORED)
            adam.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip or float("inf"))
            adam.step()
            folder.log({"step": step, "loss": loss.item(), "grad_norm": norm.item(), "learning_rate": rate})  # <-

    kept = {n: {"weights": p.detach(), **adam.state[p]} for n, p in model.named_parameters()}  # <-
    folder.record(train.steps, {f"{k}/{n}": t.numpy() for n, s in kept.items() for k, t in s.items() if t.ndim})  # <-
