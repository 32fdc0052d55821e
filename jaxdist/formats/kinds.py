"""The kinds of checkpoints, one row each: how it is recognized, and how its weights are read, converted and written."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jaxdist.config import ConfigError
from jaxdist.config.plugins import named, running, unimportable
from jaxdist.config.registry import Reference, Registry, registrant, resolve
from jaxdist.formats.tables import LAYERS, TORCH_REF, naming_for

WEIGHTS = "jaxdist.convert.kinds.found:Weights"  # converts what `find` finds


@dataclass(frozen=True)
class CheckpointKind:
    """A kind of checkpoint, which both sides read and the converter may write."""

    name: str
    """Value of --to, where it is written."""
    title: str
    """The name in messages, after an article."""
    recognizes: Reference | None = None
    """The function (path) -> whether such a checkpoint is there."""
    find: Reference | None = None
    """The function (path, `jaxdist.formats.leaves.Reader`) -> `jaxdist.formats.sources.Found`, for `--init`."""
    module: str = ""
    """The module that converts it (`jaxdist.convert.kinds.registry.Format`); empty: what `find` finds is read."""
    naming: str = ""
    """Names of the tensors that are written where they came from another kind; empty where it is read alone."""
    state: bool = False
    """Whether it holds an optimizer's state and a step."""
    rates: bool = False
    """Whether such an optimizer is torch's, which has learning rates but no schedule: `read_content` takes --peak."""

    @property
    def padded(self) -> bool:
        """Whether it keeps the padding of the vocabulary: our own kinds do."""
        return self.naming in (LAYERS, TORCH_REF)

    @property
    def format(self) -> Any:
        """The module that reads and writes it. Raises ConfigError if torch, or a plugin's module, is needed and
        missing; functions of a plugin's module raise ConfigErrors."""
        if not self.module:
            return resolve(WEIGHTS)(self)
        try:
            module = import_module(self.module)
            return module if KINDS.built_in(self.name) else _Guarded(self.name, module)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == "torch":
                raise ConfigError(f"{with_article(self.title)} needs torch; pip install 'jaxdist[torch]'") from None
            if KINDS.built_in(self.name):
                raise
            raise unimportable(KINDS, self.name, "module", error) from None

    def naming_of(self, content: Any) -> str:
        """The naming of this content's tensors when they are written: that of a source of this kind, else its own."""
        origin = content.origin
        if origin.kind == self.name and origin.naming:
            return str(origin.naming)
        return naming_for(self.naming, content.experiment.model)

    def check_writes(self) -> None:
        """Raises ConfigError where a plugin's module cannot write."""
        if not KINDS.built_in(self.name) and not {"check", "write"} <= {*dir(self.format)}:
            raise ConfigError(
                f"{named(KINDS, self.name)} has no check and write in its module, which --to needs; add them, or give "
                "another --to"
            )


def _is_of_system(error: BaseException) -> bool:
    """Whether the system raised it, as of a full disk, which whoever writes reports."""
    return isinstance(error, OSError) and error.errno is not None


class _Guarded:
    """The functions of a plugin's module. They raise ConfigError where there is none of this name, for errors of their
    code, and for `read_content`, `described` and `write` without a result."""

    def __init__(self, kind: str, module: Any) -> None:
        self._kind, self._module = kind, module

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __getattr__(self, name: str) -> Any:
        row = named(KINDS, self._kind)
        if (found := getattr(self._module, name, None)) is None:
            raise ConfigError(f"{row} has no {name} in its module {self._module.__name__}; add it")

        def call(*arguments: Any, **options: Any) -> Any:
            with running(KINDS, self._kind, name, _is_of_system if name == "write" else lambda _: False):
                result = found(*arguments, **options)
            if result is None and name in ("read_content", "described"):
                raise ConfigError(f"{row}: {name} of its module returns None; return what it read")
            if name == "write" and not arguments[0].exists():
                raise ConfigError(f"{row}: write of its module wrote no file or folder; write it to its argument path")
            return result

        return call


KINDS: Registry[CheckpointKind] = Registry("kind of checkpoint", CheckpointKind, "jaxdist.formats.sources")


def register_checkpoint_kind(row: CheckpointKind) -> None:
    """Make a kind of checkpoint known to both sides. Raises ConfigError for a name that is taken."""
    KINDS.register(row, registrant())


def with_article(title: str) -> str:
    """The name of a kind of checkpoint, after "a" or "an"."""
    return f"{'an' if title[0] in 'AEIOaeio' else 'a'} {title}"
