"""The option --plugins, and the plugins of the configs and run folders that a command line names."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.config.errors import ConfigError
from jaxdist.config.experiment import read_toml
from jaxdist.config.plugins import load_plugins, plugins_of
from jaxdist.config.section import listed
from jaxdist.formats.described import RUN_CONFIG
from jaxdist.runs.checkpoints import run_of

HELP = "packages to import, which register families, optimizers, strategies, data sources and kinds of checkpoints"


def add_plugins(parser: argparse.ArgumentParser) -> None:
    """The option --plugins."""
    parser.add_argument("--plugins", type=listed, action="extend", default=[], metavar="PACKAGE[,PACKAGE]", help=HELP)


def merged(config: Any, option: Sequence[str]) -> Any:
    """The plugins of a config, and those of --plugins after them; what a config has of another type stays."""
    config = listed(config)
    are_names = isinstance(config, list | tuple | None) and all(isinstance(name, str) for name in config or ())
    if not option or not are_names:
        return config
    return [*dict.fromkeys([*(config or ()), *listed(option)])]


def load_named(option: Sequence[str], *paths: Path | None) -> None:
    """Load the plugins of --plugins, and those of the runs at `paths`. Raises ConfigError."""
    load_plugins(option)
    for path in paths:
        load_plugins(plugins_at(path) if path else ())


def plugins_at(path: Path) -> Sequence[str]:
    """The plugins of a run folder, or the run that a checkpoint belongs to; none where it has no config that can be
    read, which whoever reads it says."""
    with suppress(ConfigError, OSError):
        run = path if path.is_dir() and (path / RUN_CONFIG).is_file() else run_of(path)
        if run and (run / RUN_CONFIG).is_file():
            return plugins_of(read_toml(run / RUN_CONFIG))
    return ()
