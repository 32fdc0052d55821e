"""llm.c's checkpoints as contents: weights, and the optimizer's state beside them."""

from pathlib import Path

import numpy as np

from jaxdist.config import ConfigError, Experiment, llmc
from jaxdist.config.display import say
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.nanogpt import filled
from jaxdist.convert.reader import READER
from jaxdist.formats import llmc_files
from jaxdist.formats.llmc_files import MASTERS, NAMING, PROCESSES, STEP, header_of, laid_out, shapes_of


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under nanoGPT's names. Raises ConfigError."""
    experiment = Experiment.parse(llmc_files.sections(path), f"{path}: header")
    return dict(llmc_files.weights(path, experiment.model, READER))


def opened(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a model file, with the state beside it; its float32 master weights in place of bfloat16 ones.

    Raises ConfigError."""
    sections = llmc_files.sections(path)
    found = Experiment.parse(sections, f"{path}: header")
    experiment = agreed(str(path), found, filled(sections, wanted, str(path)) if wanted else None)
    weights = llmc_files.weights(path, experiment.model, READER)
    groups: dict[str, Leaves] = {PARAMETERS: weights}
    left, step, updates = list[str](), 0, None
    state = path.with_name(f"{path.stem.replace('model', 'state', 1)}_00000.bin")
    if training and state.is_file() and state != path:
        header = header_of(state)
        step, processes = int(header[STEP]), int(header[PROCESSES])
        if header[0] != llmc.STATE:
            raise ConfigError(f"{state} is no state of llm.c's; use a whole copy, or leave it out")
        if processes != 1:
            left.append(f"the moments of {state.name}, which {processes} processes shared")
        else:
            kinds = ["exp_avg", "exp_avg_sq", *([PARAMETERS] if header[MASTERS] else [])]
            places = laid_out(state, shapes_of(experiment.model, READER), np.dtype(np.float32), len(kinds))
            groups |= dict(zip(kinds, places, strict=True))
            updates = step
            say(f"{path}: llm.c keeps no learning rate: the config's schedule is taken, --model gives another")
    return Content(experiment, NAMING, groups, step, updates, Origin("llmc", NAMING, left=left)).checked(path)
