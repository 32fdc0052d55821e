"""LoRA adapters of PEFT, which are not models: recognized, and what they say of themselves."""

from pathlib import Path
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.config.bounded import read_json

CONFIG = "adapter_config.json"


def is_adapter(path: Path) -> bool:
    """Whether `path` is the folder of one."""
    return (path / CONFIG).is_file()


def refusal(path: Path) -> ConfigError:
    """The error for an adapter that is given as a model."""
    settings = settings_of(path)
    base = settings.get("base_model_name_or_path") or "a base model that it does not name"
    return ConfigError(
        f"{path} is a PEFT adapter ({settings.get('peft_type')}, r = {settings.get('r')}) of {base}, and no model; "
        f"merge it into that model's Hugging Face folder BASE by `python -m jaxdist.convert BASE MERGED --adapter "
        f"{path}`, and give MERGED"
    )


def settings_of(path: Path) -> dict[str, Any]:
    """The adapter_config.json. Raises ConfigError."""
    try:
        found = read_json(path / CONFIG)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / CONFIG}: {error}; give a folder that PEFT's save_pretrained wrote") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path / CONFIG}: no settings of an adapter; give a folder that PEFT's save_pretrained wrote"
        )
    return found
