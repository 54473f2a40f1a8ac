"""`jaxserve serve`: the HTTP server."""

from __future__ import annotations

from typing import Any

import click

from jaxserve.cli.options import server_args, server_options


@click.command(short_help="Serve a model over HTTP.")
@click.argument("model", required=False)
@server_options()
def serve(model: str | None, **options: Any) -> int:
    """Serve a model over HTTP until SIGTERM or Ctrl-C.

    MODEL is a folder with a Hugging Face checkpoint, the same as --model-path; demo is the built-in model. The API is SGLang's
    (/generate, ...) and OpenAI's (/v1/chat/completions, ...); /docs describes it.
    """
    args = server_args(options, model)
    from jaxserve.server.launch import launch_server

    return launch_server(args)
