"""The state of `torch.amp.GradScaler`, which keeps its rule beside its numbers."""

from collections.abc import Mapping
from typing import Any

from jaxdist.config import Precision
from jaxdist.loss_scale import LossScale, state_of

RULE = ("growth_factor", "backoff_factor", "growth_interval")


def scaling(state: Mapping[str, Any]) -> LossScale | None:
    """Its numbers; None of a scaler that is switched off, whose state is empty."""
    if "scale" not in state:
        return None
    return state_of(state["scale"], state.get("_growth_tracker", 0))


def settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """The precision section of an experiment that was trained so: under autocast to float16."""
    return {"policy": "fp16"} | {name: state[name] for name in RULE if name in state} if "scale" in state else {}


def state_dict(now: LossScale, precision: Precision) -> dict[str, Any]:
    """What `GradScaler.state_dict` would give."""
    rule = {name: getattr(precision, name) for name in RULE}
    return {"scale": float(now.scale)} | rule | {"_growth_tracker": int(now.good)}
