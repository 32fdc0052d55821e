"""After a conversion: what was written is read again, and both ends compute the same logits."""

import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ConfigError, Experiment, ResNet, TrainingError
from jaxdist.config.checkpoints import check_whole
from jaxdist.config.hf import experiment_for
from jaxdist.convert.content import PARAMETERS, Content, Leaves
from jaxdist.convert.kinds import Kind
from jaxdist.convert.stream import Conversion, Recut
from jaxdist.convert.tables import OWN
from jaxdist.mesh import lay_out
from jaxdist.program import Program


def verify_source(path: Path) -> Iterator[str]:
    """A line that says that a torch file, or Meta's, is as it was written. Raises ConfigError where it is not.

    Run folders have been compared with their manifest already; safetensors have no checksums.
    """
    files = [path] if path.is_file() else sorted(path.glob("consolidated.*.pth"))
    for file in filter(zipfile.is_zipfile, files):
        try:
            with zipfile.ZipFile(file) as archive:
                summed = any(record.CRC for record in archive.infolist())  # not by torch's set_crc32_options(False)
                damaged = archive.testzip() if summed else None
        except Exception as error:  # of a damaged directory, many kinds
            raise ConfigError(f"{file}: its records cannot be read: {error}; use a whole copy") from None
        if damaged:
            raise ConfigError(f"{file}: its record {damaged} has changed since it was written; use a whole copy")
        if summed:
            yield f"verified: the records of {file.name} have their checksums"


@contextmanager
def comparing(checkpoint: Path | None) -> Iterator[Callable[[], None]]:
    """Within, a checkpoint's files are compared with its manifest, beside whatever else reads them: to do it before
    would read them twice from the disk. What comes of it is to be waited for; at the end no more is read.

    The wait raises Damaged where one has changed.
    """
    if checkpoint is None:
        yield lambda: None
        return
    ended, half = Event(), max(1, (os.cpu_count() or 1) // 2)
    with ThreadPoolExecutor(1) as pool:
        compared = pool.submit(check_whole, checkpoint, ended=ended.is_set, threads=half)
        try:
            yield compared.result
        finally:
            ended.set()


@contextmanager
def unchanged(wait: Callable[[], None]) -> Iterator[None]:
    """At its end a comparison is waited for, which explains what else was raised. Signals do not wait, nor does what
    the target is to blame for."""
    try:
        yield
    except TrainingError:
        raise
    except Exception:
        wait()
        raise
    wait()


def verify_tensors(conversion: Recut, written: Mapping[str, Leaves]) -> Iterator[str]:
    """A line that says that all tensors are there. Raises TrainingError where what was written is not what was read."""

    def compare(group: str, name: str, array: np.ndarray) -> None:
        there = written[group][name].read()
        if there.dtype != array.dtype or not np.array_equal(bits(there), bits(array)):
            raise TrainingError(f"{group} {name} was written and read again as other numbers; nothing is kept")

    conversion.each(compare, *conversion.groups)
    yield f"verified: {sum(map(len, conversion.groups.values()))} tensors read again are equal to the bit"


def verify(target: Kind, path: Path, conversion: Conversion) -> Iterator[str]:
    """Lines that say what holds. Raises TrainingError where what was written to `path` is not what was read."""
    content = conversion.content
    written = target.format.opened(path, content.experiment)
    with comparing(written.checkpoint) as wait, unchanged(wait):
        yield from verify_tensors(conversion, written.groups)
    for name, leaf in written.origin.buffers.items():
        if name in content.origin.buffers and not leaf.equals(content.origin.buffers[name]):
            raise TrainingError(f"buffer {name} was written and read again as other numbers; nothing is kept")
    if (written.step, written.updates) != (content.step, content.updates):
        raise TrainingError(f"step {content.step} was written and read again as {written.step}; nothing is kept")
    scales = [tuple(map(float, c.scaling)) if c.scaling else None for c in (content, written)]
    if scales[0] != scales[1]:
        raise TrainingError("the loss scale {} was written and read again as {}; nothing is kept".format(*scales))
    here, there = logits(content), logits(written)
    equal = np.array_equal(here, there, equal_nan=True)
    apart = np.max(np.abs(here - there), initial=0) / np.max(np.abs(here), initial=0) if not equal else 0
    if conversion.dtype is None and not equal:
        raise TrainingError(f"logits of SOURCE and of what was written differ by {apart:.2g}; nothing is kept")
    same = "equal to the bit" if equal else f"within {apart:.2g} of the largest, in {conversion.dtype}"
    yield f"verified: logits of a probe batch, {'×'.join(map(str, here.shape))}, are {same}"


def bits(array: np.ndarray) -> np.ndarray:
    """The same, as whole numbers: NaNs are compared like all others."""
    return array.view(f"u{array.itemsize}")


def logits(content: Content) -> np.ndarray:
    """Of two short sequences, in float32, on one device: [2, T, V]; of two images [2, V]."""
    model = content.experiment.model
    values = experiment_for(model.model_dump(), "verify").model_dump() | {"parallel": {"mesh": "1x1"}}
    experiment = Experiment.parse(values, source="verify")
    program = Program(experiment, lay_out(experiment.parallel.axes(None), jax.devices("cpu")[:1]))
    weights = {
        name: jnp.asarray(array.astype(np.float32)) for _, name, array in Conversion(content, OWN).stream(PARAMETERS)
    }
    random = np.random.default_rng(0)
    if isinstance(model, ResNet):
        return program.logits(weights, random.random((2, model.image, model.image, model.channels), np.float32))
    tokens = random.integers(model.vocab, size=(2, min(16, model.positions)), dtype=np.int32)
    return program.logits(weights, tokens)
