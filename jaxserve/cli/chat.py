"""`jaxserve chat`: a conversation in the terminal, with a model loaded for it or with a running server.

line -> messages -> backend (Engine | HTTP) -> pieces of text -> terminal -> messages
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import click

from jaxserve.cli.engine import start_engine, stream_text
from jaxserve.cli.http_client import ServerError, base_url, stream_events, wait_for_server
from jaxserve.cli.options import HTTP_ONLY, server_options
from jaxserve.cli.sampling import sampling_options, take_sampling
from jaxserve.models import generation_defaults

if TYPE_CHECKING:
    from jaxserve.server.engine import Engine

Message = dict[str, str]

_HELP = "/reset begins a new conversation, /exit (or Ctrl-D) ends. Ctrl-C stops an answer."
# /generate's names for sampling fields that OpenAI calls otherwise.
_OPENAI_NAMES = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"}


class ChatBackend(Protocol):
    def answer(self, messages: list[Message]) -> Iterator[str]:
        """The answer's text, piece by piece. Raises click.ClickException. Closing the iterator aborts."""


class EngineChat:
    def __init__(self, engine: Engine, sampling: dict[str, Any]) -> None:
        self._engine = engine
        self._sampling = sampling

    def answer(self, messages: list[Message]) -> Iterator[str]:
        tokenizer = self._engine.tokenizer
        if not tokenizer.chat_template:
            raise click.ClickException("The model has no chat template; name one with --chat-template or use `generate`.")
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # whatever a template of the model's author raises for messages it cannot render
            raise click.ClickException(f"The chat template cannot render these messages: {error}") from None
        input_ids = tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        return stream_text(self._engine, self._sampling, input_ids=input_ids)


class ServerChat:
    def __init__(self, address: str, api_key: str | None, sampling: dict[str, Any]) -> None:
        """Returns when the server is ready. Raises click.ClickException if there is none, or if it wants another key."""
        try:
            base = base_url(address)
            self._model = wait_for_server(base, api_key, lambda line: click.echo(line, err=True))
        except ServerError as error:
            raise click.ClickException(str(error)) from None
        click.echo(f"Talking to {self._model} at {base}.", err=True)
        self._url = f"{base}/v1/chat/completions"
        self._api_key = api_key
        self._sampling = {_OPENAI_NAMES.get(name, name): value for name, value in sampling.items()}

    def answer(self, messages: list[Message]) -> Iterator[str]:
        body = {"model": self._model, "messages": messages, "stream": True, **self._sampling}
        try:
            for event in stream_events(self._url, body, self._api_key):
                for choice in event.get("choices") or ():
                    yield choice["delta"].get("content") or ""
        except ServerError as error:
            raise click.ClickException(str(error)) from None


@click.command(short_help="Talk to a model in the terminal.")
@click.argument("model", required=False)
@click.option("--url", help="Talk to a running server instead of loading a model, at localhost:30000 for example.")
@click.option("--api-key", envvar="JAXSERVE_API_KEY", help="The server's key, with --url; default: $JAXSERVE_API_KEY.")
@click.option("--system", "system_prompt", help="A system message to begin with.")
@sampling_options
@server_options(without=HTTP_ONLY, defaults={"log_level": "warning"})
def chat(model: str | None, url: str | None, api_key: str | None, system_prompt: str | None, **options: Any) -> int:
    """Talk to a model, line by line.

    MODEL is a folder with a Hugging Face checkpoint, the same as --model-path; demo is the built-in model.
    """
    sampling = take_sampling(options)
    first = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if url is not None:
        if model or options["model_path"]:
            raise click.UsageError("Give either a model or --url, not both.")
        converse(ServerChat(url, api_key, sampling), first)
        return 0
    with start_engine(options, model) as engine:
        defaults = {} if options["sampling_defaults"] == "openai" else generation_defaults(engine.server_args.model_path)
        converse(EngineChat(engine, {**defaults, **sampling}), first)
    return 0


def converse(backend: ChatBackend, first: list[Message]) -> None:
    """Reads lines until the end of input; keeps the conversation."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # importing it gives input() line editing and history
        click.echo(_HELP, err=True)
    messages = list(first)
    while (line := _read_line("> " if interactive else "")) is not None:
        line = line.strip()
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(first)
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            _take_turn(backend, messages, line, interactive)


def _read_line(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


def _take_turn(backend: ChatBackend, messages: list[Message], line: str, interactive: bool) -> None:
    """Adds a question and its answer to the conversation; a question that failed is taken back."""
    asked = {"role": "user", "content": line}
    answer = ""
    try:
        with contextlib.closing(_generator(backend.answer([*messages, asked]))) as pieces:
            for piece in pieces:
                answer += piece
                click.echo(piece, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False, err=True)
    except click.ClickException as error:
        if not interactive:
            raise
        newline = "\n" if answer else ""
        click.echo(f"{newline}error: {error.format_message()}", err=True)
        return
    click.echo()
    messages += [asked, {"role": "assistant", "content": answer}]


def _generator(pieces: Iterator[str]) -> Any:
    """As a generator, which can be closed; whatever is iterated is closed with it."""
    yield from pieces
