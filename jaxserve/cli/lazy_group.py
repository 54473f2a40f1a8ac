"""A group of commands that imports each when it is asked for: `jaxserve serve` does not wait for what `bench` needs."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Lists its commands as they were given, the first that a newcomer needs first."""

    def __init__(self, *args: Any, places: Mapping[str, str], **kwargs: Any) -> None:
        """`places`: where each command is, as `module:name`."""
        super().__init__(*args, **kwargs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._places:
            return None
        command: click.Command = pkgutil.resolve_name(self._places[cmd_name])
        return command
