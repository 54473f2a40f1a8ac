"""`jaxserve bench replay`: requests of a dump, sent again."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING

import click

from jaxserve.cli.http_client import ServerError, authorization, base_url, wait_for_server

if TYPE_CHECKING:
    from jaxserve.bench.replay import Answer, Dump, Recorded


@click.command("replay", short_help="Send the requests of a dump again, and say what differs.")
@click.argument("file", type=click.Path())
@click.option("--base-url", "address", default="http://127.0.0.1:30000", show_default=True, help="The server.")
@click.option("--api-key", envvar="JAXSERVE_API_KEY", help="The server's key; default: JAXSERVE_API_KEY in the environment.")
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    show_default=True,
    help="1: with the times between them of then; 2: twice as fast; inf: as fast as possible.",
)
@click.option("--max-concurrency", type=click.IntRange(1), default=256, show_default=True, help="Most requests at a time.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=600.0, show_default=True, help="Of a reply, in s.")
def replay(file: str, address: str, api_key: str | None, speed: float, max_concurrency: int, timeout: float) -> int:
    """Send the requests of a dump (of --crash-dump-folder or dump_requests_folder) to a server again, each with its own
    sampling parameters, and say what differs from the answers of then: status, finish reason, and of greedy requests and those
    with a seed tokens and text. Exit status 1 if something does.

    \b
      jaxserve bench replay /dumps/host/crash_2026-11-23_17-15-47.000000_42.jsonl --speed inf
    """
    from jaxserve.bench.replay import DumpFileError, read_dump
    from jaxserve.bench.replay import replay as send_again

    try:
        dump = read_dump(file)
        base = base_url(address)
        wait_for_server(base, api_key, lambda line: click.echo(line, err=True))
    except (DumpFileError, ServerError) as error:
        raise click.ClickException(str(error)) from error
    _introduce(dump)
    report = _Report(dump)
    work = send_again(
        dump.requests,
        base,
        headers=authorization(api_key),
        speed=speed,
        max_concurrency=max_concurrency,
        timeout_s=timeout,
        answered=report.answered,
    )
    try:
        asyncio.run(work)
    finally:  # also of what had ended when somebody pressed Ctrl-C
        with contextlib.suppress(BrokenPipeError):
            report.close()
    return 1 if report.num_different else 0


def _introduce(dump: Dump) -> None:
    if dump.reason is not None:
        click.echo(f"Written because: {dump.reason}")
    if dump.left_out:
        click.echo(f"{dump.left_out} requests with input_embeds are left out: a dump has only their size.")


class _Report:
    """A line for each request that differs, as it ends, and the counts."""

    def __init__(self, dump: Dump) -> None:
        self._num_requests = len(dump.requests)
        self._num_answered = self._num_compared = self.num_different = 0
        self._kinds: collections.Counter[str] = collections.Counter()

    def answered(self, recorded: Recorded, answer: Answer) -> None:
        from jaxserve.bench.replay import differences

        found = differences(recorded, answer)
        self._num_answered += 1
        self._num_compared += recorded.is_determined
        self.num_different += bool(found)
        for one in found:
            self._kinds[one.kind] += 1
            click.echo(f"line {recorded.line}, {recorded.rid!r}: {one.kind} {one.sentence}")

    def close(self) -> None:
        from jaxserve.bench.replay import KINDS

        kinds = ", ".join(f"{kind} {self._kinds[kind]}" for kind in KINDS if self._kinds[kind])
        different = f"{self.num_different} different" + (f" ({kinds})" if kinds else "")
        click.echo(
            f"{self._num_answered} of {self._num_requests} requests replayed: {self._num_answered - self.num_different} as then"
            f", {different}; the tokens of {self._num_compared} could be compared."
        )
