"""Memory and pace of conversions, each paired with `cp`: `python -m parity_tests.validation.streaming`.

A synthetic Llama in bfloat16 is written as a Hugging Face folder, converted to every kind and back; and a run's own
checkpoint, with moments in float32, to torch's kinds. Each conversion's peak resident memory is compared with 1 GB and
twice the largest tensor, and its bytes per second with those of `cp -r` of the same source to the same disk. They
alternate several times; the median of the ratios counts. Both read the source from the disk, as for one larger than
memory: the page cache drops it first.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxdist.config import exit_codes
from jaxdist.convert.entries import entries
from jaxdist.convert.kinds.registry import KINDS
from jaxdist.convert.kinds.safetensors_writer import lay_out
from jaxdist.convert.target import remove
from jaxdist.families.llama.config import Llama
from jaxdist.formats import buffers
from jaxdist.formats.hf import to_settings
from jaxdist.formats.safetensors_files import Tensor
from jaxdist.formats.sources import kind_of
from jaxdist.runs.folder import check_new

MEMORY, SPEED = 1e9, 0.6  # bytes beyond twice the largest tensor; share of the pace of cp
BLOCK = 10_000_000  # numbers drawn at a time
SETTLE = 5  # seconds: just-freed memory is available sooner, above all in a virtual machine
SHAPES = {4e9: (4096, 14336, 128256), 1e9: (2048, 5632, 32000), 0: (512, 1792, 16032)}  # smallest size, in bytes
PATHS = (  # source, target, the target's kind
    ("hf", "orbax", "orbax"), ("orbax", "dcp", "dcp"), ("dcp", "torch.pt", "torch"), ("torch.pt", "orbax2", "orbax"),
    ("orbax2", "hf2", "hf"), ("run", "dcp2", "dcp"), ("run", "torch2.pt", "torch"),
)  # fmt: skip


class Pair(NamedTuple):
    """Conversions, each with the copy before it. `bound` limits the memory; all in bytes or seconds."""

    source: str
    target: str
    bytes: int
    copied: list[float]
    converted: list[float]
    peak: int
    bound: float

    @property
    def pace(self) -> float:
        """Share of the pace of cp."""
        return median(copied / converted for copied, converted in zip(self.copied, self.converted, strict=True))

    @property
    def holds(self) -> bool:
        return self.peak <= self.bound and self.pace >= SPEED


def model_of(size: float) -> Llama:
    """A Llama of usual proportions with at least `size` bytes in bfloat16, by its number of layers."""
    width, hidden, vocab = next(shape for least, shape in SHAPES.items() if size >= least)
    heads, kv = width // 128, max(1, width // 512)
    layer = 2 * (2 * width * width + 2 * width * kv * 128 + 3 * width * hidden)
    layers = max(1, -int(-(size - 4 * width * vocab) // layer))
    return Llama(layers=layers, dim=width, heads=heads, kv_heads=kv, head_dim=128, hidden=hidden, vocab=vocab)


def synthesize(folder: Path, model: Llama) -> None:
    """A Hugging Face folder of random weights, written a few numbers at a time: a child process counts its parent's
    peak memory as its own."""
    described = {n: Tensor(e.shape, np.dtype(ml_dtypes.bfloat16)) for n, e in entries("huggingface", model).items()}
    random = np.random.default_rng(0)

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_settings(model, "bfloat16")), encoding="utf-8")
    places = lay_out(folder, described)
    for name, tensor in described.items():
        path, start = places[name]
        for begin in range(0, math.prod(tensor.shape), BLOCK):
            # High bits of normal numbers, as in trained weights: uniform bytes would include NaNs.
            bits = random.integers(0, 2**16, size=min(BLOCK, math.prod(tensor.shape) - begin), dtype=np.uint16)
            buffers.write(path, start + bits.itemsize * begin, bits & 0x83FF | 0x3800)


def train(folder: Path, size: float) -> None:
    """A run folder of one step, whose checkpoint has about `size` bytes, moments included."""
    model = model_of(size / 6)  # three numbers of 4 bytes for one of 2
    sizes = ("layers", "dim", "heads", "kv_heads", "head_dim", "hidden", "vocab")
    line = [text for name in sizes for text in (f"--model.{name}", str(getattr(model, name)))]
    line += ["--steps", "1", "--train.batch", "1", "--data.sequence", "8", "--train.validation_batches", "0"]
    timed([sys.executable, "-m", "jaxdist.train", "--device", "cpu", *line, "--output", str(folder)])


def measure(folder: Path, source: str, target: str, kind: str, turns: int) -> Pair:
    """`cp` and the conversion in turn; each one's output is on disk before the next starts."""
    original, copy, output = folder / source, folder / "copy", folder / target
    size = sum(file.stat().st_size for file in original.rglob("*") if file.is_file()) or original.stat().st_size
    copied, converted, peaks = [], [], []
    for _ in range(turns):
        remove(output)
        forget(original)
        copied.append(timed(["cp", "-r", str(original), str(copy)])[0])
        remove(copy)
        forget(original)
        seconds, peak = timed([sys.executable, "-m", "jaxdist.convert", str(original), str(output), "--to", kind])
        converted.append(seconds)
        peaks.append(peak)
    return Pair(source, target, size, copied, converted, max(peaks), MEMORY + 2 * largest(original, output))


def forget(path: Path) -> None:
    """Drop the files of a checkpoint from the page cache."""
    os.sync()  # only pages on disk can be dropped
    for file in filter(Path.is_file, (path, *path.rglob("*"))):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(command: Sequence[str]) -> tuple[float, int]:
    """Seconds until the command ends with its bytes on disk, and its peak resident memory in bytes.

    Ends the process where it fails.
    """
    os.sync()
    time.sleep(SETTLE)
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        os.sync()
        if status:
            output.seek(0)
            sys.exit(output.read().decode())
    return time.perf_counter() - began, 1024 * used.ru_maxrss


def largest(*paths: Path) -> int:
    """Bytes of the largest tensor at either end."""
    return max(leaf.bytes for path in paths for leaf in KINDS[kind_of(path)].format.described(path).values())


def main() -> None:
    """All pairs, in a table. Exits with 1 where one misses its goal."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.validation.streaming", description=__doc__)
    parser.add_argument("--bytes", type=float, default=8.5e9, help="size of the synthetic checkpoint")
    parser.add_argument(
        "--turns", type=int, default=3, help="number of times that each conversion is compared with cp (default 3)"
    )
    parser.add_argument("--output", type=Path, required=True, help="a new folder, with room for five times --bytes")
    a = parser.parse_args()
    check_new(a.output, f"--output {a.output}")
    a.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status("writing the synthetic checkpoint"):
        synthesize(a.output / "hf", model_of(a.bytes))
    with console.status("training a step"):
        train(a.output / "run", a.bytes)
    table = Table("from", "to", "GB", "cp, s", "conversion, s", "pace of cp", "peak, GB", "bound, GB", "holds")
    pairs = []
    for i, (source, target, kind) in enumerate(PATHS):
        pair = measure(a.output, source, target, kind, a.turns)
        for done in {source, target} - {later for later, _, _ in PATHS[i + 1 :]}:
            remove(a.output / done)
        pairs.append(pair)
        console.print(f"{source} -> {target}: {pair.pace:.2f} of the pace of cp, {pair.peak / 1e9:.2f} GB")
        gigabytes = [f"{x / 1e9:.2f}" for x in (pair.bytes, pair.peak, pair.bound)]
        times = [", ".join(f"{x:.1f}" for x in seconds) for seconds in (pair.copied, pair.converted)]
        table.add_row(source, target, gigabytes[0], *times, f"{pair.pace:.2f}", *gigabytes[1:], str(pair.holds))
    console.print(table)
    if not all(pair.holds for pair in pairs):
        sys.exit(1)


if __name__ == "__main__":
    exit_codes(main)
