"""After a conversion: what was written is read again, and both ends have the same logits, by transformers where it
reads them."""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ConfigError, Experiment, Model, TrainingError
from jaxdist.convert.content import PARAMETERS, Content, Leaves
from jaxdist.convert.stream import Conversion, Resharder
from jaxdist.formats.dcp_index import INDEX
from jaxdist.formats.folders import is_hf
from jaxdist.formats.hf import experiment_for, read_model
from jaxdist.formats.kinds import CheckpointKind
from jaxdist.formats.tables import LAYERS, OWN
from jaxdist.parallel.mesh import lay_out
from jaxdist.runs.checkpoints import check_complete, sealed
from jaxdist.runs.display import say
from jaxdist.training.program import Program

JAXDIST, TRANSFORMERS = "jaxdist", "transformers"


def verify_source(path: Path) -> Iterator[str]:
    """A line that says that what torch wrote, or Meta, is as it was written. Raises ConfigError where it is not.

    Run folders have been compared with their manifest already; safetensors have no checksums.
    """
    if (path / INDEX).is_file() and not sealed(path):
        parts = import_module("jaxdist.convert.kinds.dcp_files").embedded_files(path)
        if summed := sum(checksums(name, open_part) for name, open_part in parts):
            yield f"verified: the records of {summed} parts of {path.name} have their checksums"
    files = [path] if path.is_file() else sorted(path.glob("consolidated.*.pth"))
    for file in filter(zipfile.is_zipfile, files):
        if checksums(str(file), partial(file.open, "rb")):
            yield f"verified: the records of {file.name} have their checksums"


def checksums(name: str, open_part: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Whether the records of a file, a zip, have theirs. Raises ConfigError where these are not of what they hold."""
    try:
        with open_part() as file, zipfile.ZipFile(file) as archive:
            summed = any(record.CRC for record in archive.infolist())  # not by torch's set_crc32_options(False)
            damaged = archive.testzip() if summed else None
    except Exception as error:  # of a damaged directory, many kinds
        raise ConfigError(f"{name}: its records cannot be read: {error}; use an intact copy") from None
    if damaged:
        raise ConfigError(f"{name}: its record {damaged} has changed since it was written; use an intact copy")
    return summed


@contextmanager
def comparing(checkpoint: Path | None) -> Iterator[Callable[[], None]]:
    """Within, a checkpoint's files are compared with its manifest, beside whatever else reads them: to do it before
    would read them twice from the disk. Yields a function that waits for the result; reading ends with the context.

    The wait raises Damaged where one has changed.
    """
    if checkpoint is None:
        yield lambda: None
        return
    ended, half = Event(), max(1, (os.cpu_count() or 1) // 2)
    with ThreadPoolExecutor(1) as pool:
        compared = pool.submit(check_complete, checkpoint, ended=ended.is_set, threads=half)
        try:
            yield compared.result
        finally:
            ended.set()


@contextmanager
def unchanged(wait: Callable[[], None]) -> Iterator[None]:
    """Wait for a comparison at the end, as a changed source explains other errors. Signals do not wait, nor do errors
    of the target."""
    try:
        yield
    except TrainingError:
        raise
    except Exception:
        wait()
        raise
    wait()


def verify_tensors(conversion: Resharder, written: Mapping[str, Leaves]) -> Iterator[str]:
    """A line that says that all tensors are there. Raises TrainingError where what was written is not what was read."""

    def compare(group: str, name: str, array: np.ndarray) -> None:
        there = written[group][name].read()
        if there.dtype != array.dtype or not np.array_equal(bits(there), bits(array)):
            raise TrainingError(f"{group} {name} was written and read again as other numbers; nothing is kept")

    conversion.each(compare, *conversion.groups)
    yield f"verified: {sum(map(len, conversion.groups.values()))} tensors read again are equal to the bit"


def verify(target: CheckpointKind, source: Path, path: Path, conversion: Conversion) -> Iterator[str]:
    """Lines that say what holds. Raises TrainingError where what was written to `path` is not what was read."""
    content = conversion.content
    written = target.format.read_content(path, content.experiment)
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
    yield from verify_logits({"SOURCE": (source, content), "TARGET": (path, written)}, conversion.dtype)


def verify_logits(ends: Mapping[str, tuple[Path, Content]], dtype: str | None) -> Iterator[str]:
    """Lines that say how near the logits of both ends are, by what program those of each were computed, and whose names
    that does not test. Raises TrainingError where they are apart."""
    models = [read_model(path) if is_hf(path) else content.experiment.model for path, content in ends.values()]
    inputs, tokens = probe(*models), shared(models)
    found = {end: logits_and_program(*where, inputs) for end, where in ends.items()}
    here, there = (array[..., :tokens] for array, _ in found.values())
    programs = {end: by for end, (_, by) in found.items()}
    by = " and ".join(f"of {end} by {program}" for end, program in programs.items())
    exact = dtype is None and {*programs.values()} == {JAXDIST}
    model = ends["SOURCE"][1].experiment.model
    # A router that is rounded may send a few tokens elsewhere.
    each = has(model, "experts") and dtype is not None
    most, far = 0.0 if exact else bound(model.layers, dtype), apart(here, there, each)
    norm = "their norm, at half of the tokens" if each else "their norm"
    equal = np.array_equal(here, there, equal_nan=True)
    if far > most or (exact and not equal):
        raise TrainingError(f"logits {by} differ by {far:.2g} of {norm}, more than {most:.2g}; nothing is kept")
    same = "equal to the bit" if equal else f"within {far:.2g} of {norm}"
    allowed = "" if exact else f", where {most:.2g} is what rounding {f'to {dtype} ' if dtype else ''}may do"
    yield f"verified: logits of a probe batch, {'×'.join(map(str, here.shape))}, {by}, are {same}{allowed}"
    known = {OWN, LAYERS} | ({"huggingface"} if TRANSFORMERS in programs.values() else set())
    for end, (_, content) in ends.items():
        if content.naming not in known:
            yield (
                f"not verified: which tensor of {end} is which; jaxdist reads it by the table of the conversion "
                "(transformers verifies Hugging Face folders, where it is installed)"
            )


def has(model: Model, field: str) -> bool:
    """Whether the models of its family have a field."""
    return field in type(model).model_fields


def bits(array: np.ndarray) -> np.ndarray:
    """The same, as whole numbers: NaNs are compared like all others."""
    return array.view(f"u{array.itemsize}")


def logits_and_program(path: Path, content: Content, inputs: np.ndarray) -> tuple[np.ndarray, str]:
    """The logits of `inputs` by a checkpoint, and the program that computed them: transformers, where it is installed,
    for a Hugging Face folder of a type that it knows.

    Raises TrainingError where transformers cannot read it.
    """
    if is_hf(path):
        try:
            hf_reference = import_module("jaxdist.convert.hf_reference")
            hf_reference.load_transformers()
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers"):
                raise
        except ImportError as error:
            say(f"transformers cannot be imported: {error}; the logits of {path} are jaxdist's own")
        else:
            if hf_reference.knows(path):
                return hf_reference.logits(path, inputs), TRANSFORMERS
            say(f"transformers knows no model_type of {path}; the logits are jaxdist's own")
    return logits(content, inputs), JAXDIST


def bound(layers: int, dtype: str | None) -> float:
    """Bound on the difference of logits, relative to their norm: the independent float32 roundings of two programs with
    that many blocks, or 6.4 times the epsilon of the dtype that the weights were rounded to (0.05 for bfloat16)."""
    rounded = float(jnp.finfo(dtype).eps) if dtype else 0.0
    return max(5e-6 * math.sqrt(layers), 6.4 * rounded)


def apart(here: np.ndarray, there: np.ndarray, each: bool = False) -> float:
    """The distance of two arrays over the norm of the first, or with `each` the median of their rows'; infinite where
    one alone has a NaN or infinity."""
    finite = np.isfinite(here)
    if here.shape != there.shape or not np.array_equal(finite, np.isfinite(there)):
        return math.inf
    a, b = (np.where(finite, array, 0).astype(np.float64) for array in (here, there))
    distance, norm = (np.linalg.norm(array, axis=-1 if each else None) for array in (a - b, a))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.median(np.where(distance == 0, 0, distance / norm)))


def shared(models: Sequence[Model]) -> int | None:
    """Number of tokens that all of the models have, as new ones may have been added; None for image models."""
    return min((model.vocab for model in models if model.vocabulary), default=None)


def probe(*models: Model) -> np.ndarray:
    """Two short sequences of tokens that all of the models have, or two images."""
    random, model = np.random.default_rng(0), cast(Any, models[0])
    if model.input_kind == "images":
        return random.random((2, model.image, model.image, model.channels), np.float32)
    return random.integers(shared(models) or 0, size=(2, min(16, model.positions)), dtype=np.int32)


def logits(content: Content, inputs: np.ndarray) -> np.ndarray:
    """Our program's logits of `inputs`, in float32 on one device: [2, T, V], or [2, V] of two images."""
    model = content.experiment.model
    if has(model, "capacity"):  # no weight depends on it, and transformers leaves out no token
        model = model.model_copy(update={"capacity": 0.0})
    values = experiment_for(model.model_dump(), "verify").model_dump() | {"parallel": {"mesh": "1x1"}}
    experiment = Experiment.parse(values, source="verify")
    program = Program(experiment, lay_out(experiment.parallel.axes(None), jax.devices("cpu")[:1]))
    weights = {
        name: jnp.asarray(array.astype(np.float32)) for _, name, array in Conversion(content, OWN).stream(PARAMETERS)
    }
    return program.logits(weights, inputs)
