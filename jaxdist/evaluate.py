"""Loss and perplexity, or accuracy, of a checkpoint, or its logits: `python -m jaxdist.evaluate --checkpoint DIR`."""

import json
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from jaxdist.command_line.arguments import Parser, count, user_path
from jaxdist.command_line.plugins import add_plugins, load_named
from jaxdist.config import ConfigError, Experiment, TrainingError
from jaxdist.config.checks import check_times
from jaxdist.config.fitting import multiple
from jaxdist.config.parallel import resized
from jaxdist.convert.weights import load_weights, source_experiment
from jaxdist.data import Split, dataset_of
from jaxdist.formats.sources import located
from jaxdist.parallel.mesh import axes_of, make_mesh
from jaxdist.parallel.rematerialization import ALL_OF_IT, in_memory
from jaxdist.parallel.sharding import BATCH
from jaxdist.runs.display import aside, console, perplexity, say
from jaxdist.runtime.compilation_cache import keep_compiled
from jaxdist.runtime.malloc import keep_freed
from jaxdist.runtime.processes import check_same, from_first, run
from jaxdist.training.program import Program
from jaxdist.training.validation import pass_over


@in_memory(f"a smaller --batch, or {ALL_OF_IT}")
def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments, evaluate and print; with --json stdout holds only the JSON object."""
    a = arguments(sys.argv[1:] if argv is None else argv)
    with aside(a.json):
        line = evaluate(a)
    say(line)


@keep_compiled()
def evaluate(a: Any) -> str:
    """Experiment -> mesh -> weights -> loss over a split, or logits of given tokens, and a line that reports it.

    Raises ConfigError, TrainingError."""
    a.checkpoint = from_first(partial(located, a.checkpoint))
    experiment = configure(a)
    mesh, where = make_mesh(experiment, a.device)
    keep_freed(mesh)
    program = Program(experiment, mesh)
    if a.tokens:
        tokens = read_tokens(a.tokens, experiment, program)
        logits = program.logits(load_weights(program, a.checkpoint, a.ema), tokens).astype(np.float32)
        from_first(partial(write, a.logits, logits))
        return f"{where}: wrote logits {logits.shape} to {a.logits}"
    dataset = dataset_of(experiment)
    check_same("data.fingerprint", dataset.fingerprint)
    split: Split = "train" if a.data else "validation"
    sequences, size = dataset.sequences(split), experiment.train.batch
    if not sequences:
        raise ConfigError(f"the {split} split of {a.checkpoint} holds no sequence; give data by --data FILE")
    parameters = load_weights(program, a.checkpoint, a.ema)
    steps = range(1, min(dataset.passes(split, size), a.batches or sequences) + 1)
    shown = track(steps, description="evaluating", console=console, disable=not console.is_terminal)
    found = pass_over(program, parameters, dataset, split, shown)
    if not math.isfinite(found.loss):
        raise TrainingError(f"--checkpoint {a.checkpoint}: its loss is {found.loss}; use one from before it diverged")
    loss, counted = found.mean, int(found.counted)
    if experiment.model.input_kind == "images":
        result = {"loss": loss, "accuracy": found.correct / counted, "images": counted}
        line = f"loss {loss:.6f}, accuracy {result['accuracy']:.2%}, {counted:,} images"
    else:
        result = {"loss": loss, "perplexity": perplexity(loss), "tokens": counted}
        line = f"loss {loss:.6f}, perplexity {result['perplexity']:.4f}, {counted:,} tokens"
    return json.dumps(result) if a.json else f"{where}: {line}"


def write(file: Path, logits: np.ndarray) -> None:
    """Write a .npy file. Raises ConfigError."""
    try:
        with file.open("wb") as stream:
            np.save(stream, logits)
    except OSError as error:
        raise ConfigError(f"--logits {file}: {error}; give a file that can be written") from None


def arguments(argv: Sequence[str]) -> Any:
    """The command line. Raises ConfigError."""
    parser = Parser(prog="python -m jaxdist.evaluate", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--checkpoint",
        type=user_path,
        required=True,
        metavar="DIR",
        help="a run folder, a checkpoint or a Hugging Face folder",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="file or folder to evaluate in full (default: the run's validation split)"
    )
    parser.add_argument("--mesh", default="1x1", help="device mesh, as in training (default 1x1)")
    parser.add_argument("--strategy", default="fsdp", help="sharding strategy, as in training (default fsdp)")
    parser.add_argument("--precision", help="precision policy (default: the run's)")
    parser.add_argument("--batch", type=count, help="sequences per batch (default: the run's train.batch)")
    parser.add_argument("--batches", type=count, default=0, help="most batches to evaluate; 0: all (default 0)")
    parser.add_argument("--tokens", type=user_path, metavar="FILE.npy", help="token ids to evaluate, integers [B, T]")
    parser.add_argument(
        "--logits",
        type=user_path,
        metavar="FILE.npy",
        help="file for the float32 logits [B, T, V] of --tokens",
    )
    parser.add_argument("--ema", action="store_true", help="use the moving average of the weights")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    add_plugins(parser)
    a = parser.parse_args(argv)
    if not a.checkpoint.exists():
        raise ConfigError(f"--checkpoint {a.checkpoint}: no such folder; give a checkpoint that exists")
    load_named(a.plugins, a.checkpoint)
    if bool(a.tokens) != bool(a.logits):
        raise ConfigError("--tokens FILE.npy and --logits FILE.npy go together; give both")
    if a.logits and not a.logits.parent.is_dir():
        raise ConfigError(f"--logits {a.logits}: no such folder; give a file in one that exists")
    return a


def configure(a: Any) -> Experiment:
    """The checkpoint's own experiment, on the mesh and data asked for. Nothing is trained: no gathered weights
    are kept."""
    values = source_experiment(a.checkpoint).model_dump(exclude_none=True)
    values["parallel"] = {"mesh": a.mesh, "strategy": a.strategy}
    values["train"]["accumulation"] = 1
    if a.precision:
        values["precision"] = {"policy": a.precision}
    if a.batch is not None:
        values["train"]["batch"] = a.batch
    if a.data:
        values["data"] |= {
            "source": "files", "path": a.data, "fingerprint": "", "split": "share", "validation": 0.0, "shuffle": False,
        }  # fmt: skip
    return Experiment.parse(values, source="arguments")


def read_tokens(path: Path, experiment: Experiment, program: Program) -> np.ndarray:
    """Token ids int32 [B, T] from a .npy file. Raises ConfigError."""
    try:
        tokens = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"--tokens {path}: {error}; give a .npy file of integers [B, T]") from None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or not tokens.size or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, np.ndarray) else "several arrays"
        raise ConfigError(f"--tokens {path}: {found}; give one array of integers [B, T]")
    if experiment.model.input_kind == "images":
        raise ConfigError(f"--tokens {path}: model.family = {experiment.model.family} takes images; leave it out")
    if tokens.min() < 0 or tokens.max() >= experiment.model.vocab:
        raise ConfigError(
            f"--tokens {path}: ids from {tokens.min()} to {tokens.max()}, beyond model.vocab = "
            f"{experiment.model.vocab}; give ids from 0 to {experiment.model.vocab - 1}"
        )
    if tokens.shape[1] > experiment.model.positions:
        raise ConfigError(
            f"--tokens {path}: {tokens.shape[1]} tokens a row are more than model.positions = "
            f"{experiment.model.positions}; give at most {experiment.model.positions}"
        )
    check_times(experiment, axes_of(program.mesh), tokens.shape[1], f"--tokens {path}: tokens a row")
    axes = axes_of(program.mesh)
    ways = math.prod(axes[axis] for axis in BATCH)
    if (rows := tokens.shape[0]) % ways:
        raise ConfigError(
            f"--tokens {path}: {rows} rows cannot be divided over {' × '.join(BATCH)} = {ways}; use --mesh "
            f"{resized(axes, BATCH, math.gcd(rows, ways))}, or give {multiple(ways, rows)} rows"
        )
    return tokens.astype(np.int32)


if __name__ == "__main__":
    run(main)
