"""Logits that transformers computes from a Hugging Face folder, without any code or table of ours."""

import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jaxdist.config import TrainingError
from jaxdist.config.bounded import read_json

MAJOR = 5  # of the releases that were tested
INCOMPLETE = ("missing_keys", "mismatched_keys", "error_msgs")


def load_transformers() -> Any:
    """transformers, imported with errors alone in its log and with the Hub offline, unless the user has chosen
    otherwise: kernels and other files that a folder refers to there are not fetched.

    Raises ImportError, for a release that is too old ModuleNotFoundError.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    if int(transformers.__version__.partition(".")[0]) < MAJOR:
        raise ModuleNotFoundError(f"transformers {transformers.__version__} is too old", name="transformers")
    return transformers


def knows(folder: Path) -> bool:
    """Whether transformers has a class for the model_type of a folder; of a family from outside it need not."""
    return read_json(folder / "config.json").get("model_type") in load_transformers().CONFIG_MAPPING


def logits(folder: Path, inputs: np.ndarray) -> np.ndarray:
    """Logits of tokens [B, T] or images [B, Y, X, C], in float32. No code or pickle of the folder is executed.

    Raises TrainingError where transformers cannot read it.
    """
    images, transformers = inputs.ndim == 4, load_transformers()
    kind = transformers.AutoModelForImageClassification if images else transformers.AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    here = {"trust_remote_code": False, "local_files_only": True}
    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, **here)
        config._attn_implementation = config._experts_implementation = "eager"  # as an argument config.json's would win
        loaded: Any = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **here
        )
        model, report = loaded
        if getattr(config, "bias", True) is False:  # of a GPT-2 without biases, which transformers makes zero
            report["missing_keys"] = [name for name in report["missing_keys"] if not name.endswith(".bias")]
        if wrong := [f"{what} {report[what]}" for what in INCOMPLETE if report.get(what)]:
            raise ValueError("; ".join(wrong))
        batch = torch.from_numpy(inputs.transpose(0, 3, 1, 2).copy() if images else inputs.astype(np.int64))
        with torch.no_grad():
            return np.asarray(model.eval()(batch).logits.numpy())
    except Exception as error:  # of files and of a config that it does not take, many kinds
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise TrainingError(
            f"transformers {transformers.__version__} cannot compute the logits of {folder}: {reason}; nothing is "
            "kept. Leave out --verify to convert without it"
        ) from None
