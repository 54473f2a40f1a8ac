"""What says of an option what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def arg(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    factory: Callable[[], Any] | None = None,
    is_json: bool = False,
) -> Any:
    """A ServerArgs field: its default, the sentence `--help` shows, and what it may be. `is_json`: an object as text."""
    metadata = {"help": help, "choices": tuple(choices) if choices else None, "is_json": is_json}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
