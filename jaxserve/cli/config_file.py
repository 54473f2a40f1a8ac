"""Options of the command line from a YAML file: `--config server.yaml`.

    model-path: /models/qwen3
    tp-size: 4
    json-model-override-args: {rope_theta: 1000000}

Names are those of the options, with - or _; values have the options' types. Where an option takes JSON, or numbers with commas,
YAML's own objects and lists may stand. What the command line says wins.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Collection
from typing import Any

import click
import msgspec
import yaml

from jaxserve.config import ServerArgs, by_field

_LARGEST_BYTES = 1024 * 1024


class ConfigFile(click.ParamType):
    """Puts the file's values in the place of the command's defaults."""

    name = "file"

    def __init__(self, without: Collection[str]) -> None:
        """`without`: fields of ServerArgs that mean nothing to the command, and may stand in the file."""
        self._without = without

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        assert ctx is not None, "an option belongs to a command"
        if ctx.default_map is not None:
            self.fail("Give one file of options, not several.", param, ctx)
        try:
            options = read_config(value)
        except ValueError as error:
            raise click.UsageError(f"{value}: {error}", ctx) from None
        ctx.default_map = {name: option for name, option in options.items() if name not in self._without}
        return value


def read_config(path: str) -> dict[str, Any]:
    """The file's options by their fields' names. Raises ValueError with a sentence."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"The file of options cannot be read: {error.strerror}.") from error
    if len(data) > _LARGEST_BYTES:
        raise ValueError(f"A file of options has at most {_LARGEST_BYTES} bytes.")
    options = by_field(_options(data))
    hints = typing.get_type_hints(ServerArgs)
    fields = {field.name: field for field in dataclasses.fields(ServerArgs)}
    return {name: _value(fields[name], hints[name], value) for name, value in options.items()}


def _options(data: bytes) -> dict[str, Any]:
    try:
        loader = yaml.SafeLoader(data)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ValueError("It must hold lines of the form name: value.")
        options: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value).replace("-", "_")
            if name in options:
                raise ValueError(f"{key.value} is given twice.")
            options[name] = loader.construct_object(value, deep=True)
        return options
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"It is not YAML: {' '.join(str(error).split())}.") from error


def _value(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    name, takes_json = field.name.replace("_", "-"), field.metadata["is_json"]
    if takes_json and isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, str) and any(typing.get_origin(kind) is tuple for kind in (hint, *typing.get_args(hint))):
        return value  # as on the command line: 1,2,4
    try:
        converted = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        is_text = isinstance(value, int | float) and str in (hint, *typing.get_args(hint))
        raise ValueError(f"{name} cannot be {value!r}." + (" Put it in quotes." if is_text else "")) from None
    choices = field.metadata["choices"]
    if choices and converted is not None and converted not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}.")
    return converted
