"""Fields of a request that are not served: refused by name, unless they ask for nothing or change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from jaxserve.server.requests import RequestError

# Values that ask for nothing, next to null.
OFF: tuple[Any, ...] = (False, 0, "", [], {})

_JSON = bool | int | float | str | list | dict  # an Engine's caller may pass arrays
_MAX_SHOWN_CHARS = 80


@dataclasses.dataclass(frozen=True)
class ForeignFields:
    """What to do with fields that a request does not have. Any that is not named here is refused. Null is "not given"."""

    unserved: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # values that ask for nothing
    without_effect: Collection[str] = ()

    def check(self, fields: Mapping[str, Any], served: Iterable[str], where: str = "") -> None:
        """Raises RequestError for the first of `fields` that is not served and asks for something. `where`: what has them."""
        for name in fields.keys() - set(served):
            value = fields[name]
            if value is None or name in self.without_effect:
                continue
            path = f"{where}.{name}" if where else name
            if name not in self.unserved:
                raise unknown_field(path)
            if not isinstance(value, _JSON) or value not in self.unserved[name]:
                raise not_supported(path)


def not_supported(field: str, what: str = "is not supported yet") -> RequestError:
    return RequestError(f"{field} {what}.", param=field.partition("[")[0], code="unsupported_parameter")


def unknown_field(path: str) -> RequestError:
    shown = path if len(path) <= _MAX_SHOWN_CHARS else path[:_MAX_SHOWN_CHARS] + "..."
    message = f"{shown or repr('')} is not a field this server knows."
    return RequestError(message, param=shown.partition("[")[0], code="unknown_parameter")
