"""llm.c's checkpoints as contents: weights, and the optimizer's state beside them."""

from pathlib import Path

from jaxdist.config import Experiment
from jaxdist.convert.content import PARAMETERS, Content, Leaf, Leaves, Origin, agreed
from jaxdist.convert.kinds.nanogpt import filled
from jaxdist.convert.kinds.reader import READER
from jaxdist.formats import llmc_files
from jaxdist.formats.llmc_files import NAMING
from jaxdist.runs.display import say


def described(path: Path) -> dict[str, Leaf]:
    """Every tensor of the model, under nanoGPT's names. Raises ConfigError."""
    experiment = Experiment.parse(llmc_files.sections(path), f"{path}: header")
    return dict(llmc_files.weights(path, experiment.model, READER))


def read_content(path: Path, wanted: Experiment | None = None, training: bool = True) -> Content:
    """The content of a model file, with the state beside it; its float32 master weights in place of bfloat16 ones.

    Raises ConfigError."""
    sections = llmc_files.sections(path)
    found = Experiment.parse(sections, f"{path}: header")
    experiment = agreed(str(path), found, filled(sections, wanted, str(path)) if wanted else None)
    groups: dict[str, Leaves] = {PARAMETERS: llmc_files.weights(path, experiment.model, READER)}
    left, step, updates = list[str](), 0, None
    state = llmc_files.state_of(path, experiment.model, READER) if training else None
    if state:
        step = state.step
    if state and not state.groups:
        left.append(f"the moments of {state.file.name}, which {state.processes} processes shared")
    elif state:
        groups |= state.groups
        updates = step
        say(f"{path}: llm.c keeps no learning rate: the config's schedule is taken, --model gives another")
    return Content(experiment, NAMING, groups, step, updates, Origin("llmc", NAMING, left=left)).checked(path)
