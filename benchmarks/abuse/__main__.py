"""A mix of everything that clients and accidents do to a server, for minutes, and what the server made of it.

    python -m benchmarks.abuse --minutes 30 [--seed 1] [--out FOLDER]      `make fuzz`
    python -m benchmarks.abuse --minutes 0.4 --no-kills                    a smoke test

Broken HTTP, random JSON on every route, clients that leave, floods, aborts, pauses, grammars, tools, sessions, logprobs; in
the last third processes are killed and stopped as well. Beside it a witness streams patiently. Between the rounds the server
must be idle and its pool whole. Ends with a table, and report.json, report.txt and the server's logs in FOLDER; the exit status
is 1 if anything was not as it must be: a 5xx that says none of what a 5xx is for, a traceback, a request without an end, memory
that grows, a witness that waits too long. SIGINT and SIGTERM end the mix early; what was seen until then is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import pathlib
import signal
import sys
import tempfile

from benchmarks.abuse.mix import Mix
from benchmarks.abuse.report import as_table, make_report, write
from benchmarks.abuse.subject import Subject
from jaxserve.demo import demo_model_path

# A KV pool takes memory as it is used: a small one has all of its early, and what grows after that grows for another reason.
# It is full all the time, too.
_SMALL_POOL = ("--max-total-tokens", "32768")
_FEATURES = ("--enable-return-hidden-states", "--tool-call-parser", "qwen25")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.abuse", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30, help="how long in all, without the starts of servers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crowd", type=int, default=12, help="how many act at the same time")
    parser.add_argument("--round-s", type=float, default=30, help="seconds between two looks at whether the server is whole")
    parser.add_argument("--no-kills", action="store_true", help="leave the server's processes alone")
    parser.add_argument(
        "--out", type=pathlib.Path, help="folder for the report and the logs; default: a fresh one in the temporary folder"
    )
    parser.add_argument("--model-path", default=demo_model_path())
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of jaxserve serve, after --")
    return parser.parse_args(argv)


async def run(mix: Mix, minutes: float, kills: bool) -> None:
    """Until the time is over or a signal comes."""
    seconds = 60 * minutes
    alone_s = min(60.0, 0.15 * seconds)
    killing_s = 0.33 * seconds if kills else 0.0
    task = asyncio.create_task(mix.run(alone_s, seconds - alone_s - killing_s, killing_s))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except Exception as error:
        mix.tally.fail("mix", f"ended early: {type(error).__name__}", str(error))
    finally:
        mix.measures.mark("end")
        await mix.close()


def main() -> int:
    options = parse()
    folder = options.out or pathlib.Path(tempfile.mkdtemp(prefix="abuse-"))
    folder.mkdir(parents=True, exist_ok=True)
    subject = Subject(folder, ["--model-path", options.model_path, *_SMALL_POOL, *_FEATURES, *options.serve_options])
    mix = Mix(subject, options.seed, options.crowd, min(options.round_s, 15 * options.minutes))
    try:
        asyncio.run(run(mix, options.minutes, not options.no_kills))
    finally:
        subject.kill()
    report = make_report(mix, folder, {name: str(value) for name, value in vars(options).items()})
    write(report, folder)
    print(as_table(report))
    print(f"report and logs: {folder}", file=sys.stderr)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
