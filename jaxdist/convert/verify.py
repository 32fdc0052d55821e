"""After a conversion: what was written is read again, and both ends compute the same logits."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import Experiment, TrainingError
from jaxdist.convert.content import PARAMETERS, Content
from jaxdist.convert.kinds import Format
from jaxdist.convert.stream import Conversion
from jaxdist.convert.tables import OWN
from jaxdist.mesh import lay_out
from jaxdist.program import Program


def verify(conversion: Conversion, target: Format, path: Path) -> Iterator[str]:
    """Lines that say what holds. Raises TrainingError where what was written to `path` is not what was read."""
    content = conversion.content
    written = target.opened(path, content.experiment)

    def compare(group: str, name: str, array: np.ndarray) -> None:
        there = written.groups[group][name].read()
        if there.dtype != array.dtype or not np.array_equal(bits(there), bits(array)):
            raise TrainingError(f"{group} {name} was written and read again as other numbers; nothing is kept")

    conversion.each(compare, *conversion.groups)
    if (written.step, written.updates) != (content.step, content.updates):
        raise TrainingError(f"step {content.step} was written and read again as {written.step}; nothing is kept")
    count = sum(map(len, conversion.groups.values()))
    yield f"verified: {count} tensors read again are equal to the bit"
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
    """Of two short sequences, in float32, on one device: [2, T, V]."""
    model = content.experiment.model
    values = {"model": model.model_dump(), "data": {"sequence": min(16, model.positions)}, "parallel": {"mesh": "1x1"}}
    experiment = Experiment.parse(values, source="verify")
    program = Program(experiment, lay_out(experiment.parallel.axes(None), jax.devices("cpu")[:1]))
    weights = {
        name: jnp.asarray(array.astype(np.float32)) for _, name, array in Conversion(content, OWN).stream(PARAMETERS)
    }
    tokens = np.random.default_rng(0).integers(model.vocab, size=(2, experiment.data.sequence), dtype=np.int32)
    return np.asarray(program.logits(weights, tokens))
