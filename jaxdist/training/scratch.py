"""Temporary memory of a step, estimated before anything is traced."""

import math

from jaxdist.accounting.traffic import ITEMSIZE, tokens_of
from jaxdist.config import Experiment
from jaxdist.families import models
from jaxdist.parallel import sharding
from jaxdist.runtime.processes import world


def scratch(experiment: Experiment) -> float:
    """Estimated bytes that a step needs beside its state on each of this process's devices; 0 for a single device, and
    where their number is not known before they are made.

    It reads declared parameters alone, so it holds for any model: gradients, and for each token (or image) of a
    microbatch the results of all products, half of them with their gradient; with rematerialization those of three
    blocks. Heads add attention's scores. A family's closed form is more exact, where it has one.
    """
    e = experiment
    if not e.parallel.sized:
        return 0.0
    e.check_mesh(mesh := e.parallel.axes())
    if math.prod(mesh.values()) == world().size:
        return 0.0
    matrices = [spec for spec in models.param_specs(models.build(e.model)).values() if spec.decays]
    row, kept = sharding.strategy(e.parallel), 1 if e.memory.remat == "none" else min(1, 3 / e.model.layers)
    gradients = results = 0.0
    for spec in matrices:
        gradients += math.prod(spec.local_shape(mesh, row.gradients))
        stacked, *_, out = spec.local_shape(mesh, sharded=False)
        results += kept * stacked * out if "layers" in spec.axes else out
    scores = e.model.layers * e.model.heads * e.data.sequence
    results += kept * scores / (mesh["pipeline"] * mesh["tensor"] * mesh["context"])
    copies = 1 + (e.train.accumulation > 1)  # those of a microbatch, and their sum
    return ITEMSIZE["float32"] * (copies * gradients + 1.5 * tokens_of(e, mesh) * results)
