"""Starting an Engine for a command in the terminal, and reading the text it streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import click

from jaxserve.cli.options import server_args
from jaxserve.server.requests import RequestError

if TYPE_CHECKING:
    from jaxserve.server.engine import Engine


def start_engine(options: dict[str, Any], model: str | None = None) -> Engine:
    """An Engine that streams new text only. Raises click.ClickException with the reason it cannot start."""
    args = server_args(options, model).replace(incremental_streaming_output=True)
    from jaxserve.server.engine import Engine, EngineError

    click.echo(f"Loading {args.model_path} ...", err=True)
    try:
        return Engine(server_args=args)
    except (ValueError, EngineError) as error:
        raise click.ClickException(str(error)) from None


def stream_text(engine: Engine, sampling: Mapping[str, Any], **prompt: Any) -> Iterator[str]:
    """The text of one request, piece by piece; closing the iterator aborts the request."""
    try:
        replies = engine.generate(sampling_params=sampling, stream=True, **prompt)
        with closing(cast(Any, replies)):
            for reply in replies:
                yield cast(Mapping[str, Any], reply)["text"]
    except RequestError as error:
        raise click.ClickException(error.message) from None
