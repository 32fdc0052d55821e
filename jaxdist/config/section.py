"""Tables of fields, and the kinds of numbers that all of them are made of."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError


def _number(value: Any) -> Any:
    """Python counts true and false among the integers; a config does not."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "must be a number, not true or false")
    return value


NUMBER = pydantic.BeforeValidator(_number)
Count = Annotated[int, NUMBER, Field(ge=1, lt=2**31)]  # steps are counted in int32
CountOrZero = Annotated[int, NUMBER, Field(ge=0, lt=2**31)]
Seed = Annotated[int, NUMBER, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, NUMBER, Field(ge=0, lt=1)]
Share = Annotated[float, NUMBER, Field(ge=0, le=1)]
Positive = Annotated[float, NUMBER, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, NUMBER, Field(ge=0, allow_inf_nan=False)]


if TYPE_CHECKING:
    fallback = property
else:

    class fallback:
        """A property that a field of the same name in a subclass replaces.

        Classes do not have it as an attribute: pydantic warns of fields that replace one.
        """

        def __init__(self, value: Callable[[Any], Any]) -> None:
            self.value = value
            self.__doc__ = value.__doc__

        def __get__(self, section: Any, owner: type | None = None) -> Any:
            if section is None:
                raise AttributeError(self.value.__name__)
            return self.value(section)


class Section(pydantic.BaseModel):
    """A frozen table of fields; a key that it lacks is an error. A field's docstring is its help."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", validate_default=True, ignored_types=() if TYPE_CHECKING else (fallback,)
    )

    @classmethod
    @cache
    def docstrings(cls) -> dict[str, str]:
        """Docstrings of the fields, inherited ones too, from the source. Pydantic would read it at every start."""
        found: dict[str, str] = {}
        for table in (table for table in reversed(cls.__mro__) if issubclass(table, Section)):
            try:
                source = inspect.getsource(table)
            except (OSError, TypeError):  # where modules are installed without it
                continue
            (definition,) = ast.parse(textwrap.dedent(source)).body
            assert isinstance(definition, ast.ClassDef)
            for pair in pairwise(definition.body):
                match pair:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                        found[name] = inspect.cleandoc(text)
        return found


def listed(value: Any) -> Any:
    """The parts of a text with commas between; any other value itself."""
    return [part for part in value.replace(" ", "").split(",") if part] if isinstance(value, str) else value


LISTED = pydantic.BeforeValidator(listed)
Counts = Annotated[tuple[Count, ...], LISTED]
