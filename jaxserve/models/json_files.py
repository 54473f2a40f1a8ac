"""JSON files of a model's folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_json(path: Path, *, required: bool) -> dict[str, Any]:
    """A JSON object from a file. ValueError names the file; a missing file is {} unless required."""
    if not path.is_file():
        if not required:
            return {}
        raise ValueError(f"{path} does not exist; the model folder must hold a Hugging Face {path.name}.")
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def read_json_value(path: Path) -> Any:
    """ValueError names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


@contextlib.contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """What the block finds wrong with values becomes a ValueError that names the file they are from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ValueError(f"{path}: a value is of the wrong kind: {error}.") from error
