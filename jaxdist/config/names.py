"""Fields whose values are the names of registered rows."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticCustomError, core_schema


class OneOf:
    """Annotates a field that names one of `rows`, those of plugins too; other values are refused as by a Literal."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = rows

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: Any) -> str:
        if isinstance(value, str) and value in self.rows:
            return value
        *first, last = map(repr, self.rows)
        expected = f"{', '.join(first)} or {last}" if first else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
