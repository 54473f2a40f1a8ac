"""Every kernel on the GPU at hand: is it right, how fast, how near to the device's limits, and against what else there is.

    python -m benchmarks.device --out FOLDER [--only SECTION ...]

See docs/device.md: what the sections are, the sequence of runs, and what stands in the folder.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import os
import re
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.device.events import EVENTS_FILE, EventLog, done, latest_results, read_events
from benchmarks.device.machine import ROOT, UnfitMachineError, facts, gpu, watched_gpu, worker_environment
from benchmarks.device.report import write_report
from benchmarks.device.sections import NAMES, SECTIONS
from benchmarks.device.supervisor import Run, run_sections

FAILED = "failed"
GATES = {section.name for section in SECTIONS if section.is_gate}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for events, log and report; a later run goes on in it")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SECTION", help=", ".join(NAMES))
    parser.add_argument("--budget-s", type=float, default=540.0, help="everything ends after so many seconds (default: 540)")
    again = (*NAMES, FAILED)
    parser.add_argument(
        "--again", nargs="+", choices=again, default=[], metavar="SECTION", help=f"run these once more, or what {FAILED}"
    )
    parser.add_argument(
        "--merge", nargs="+", type=Path, default=[], metavar="FOLDER", help="take over what other runs recorded"
    )
    parser.add_argument("--match", type=_expression, default="", metavar="REGEX", help="only cases with such a name")
    parser.add_argument("--shape", default="", help="for tune: HEADS/KV_HEADS,HEAD_DIM,PAGE_SIZE,KV_DTYPE")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / ".device-wheels", metavar="FOLDER", help="of `make device-wheels`"
    )
    parser.add_argument("--commit", help="what to record where git cannot tell")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on a CPU, kernels interpreted")
    parser.add_argument("--report", action="store_true", help="run nothing; write the report of what is in the folder")
    return parser


def _expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
    return text


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / EVENTS_FILE).open("a").close()
    except OSError as error:
        raise UnfitMachineError(f"--out {folder} cannot be written to: {error.strerror}") from error


def _merge(log: EventLog, folders: Iterable[Path]) -> None:
    for folder in folders:
        try:
            print(f"{log.merge(folder)} records taken over from {folder}")
        except OSError as error:
            raise UnfitMachineError(f"--merge {folder}: there is no {EVENTS_FILE} to read: {error.strerror}") from error


def forget(log: EventLog, out: Path, wanted: list[str], match: str = "") -> None:
    """What was asked for again does not count as done, nor does a failure that would end this run, too."""
    events = read_events(out / EVENTS_FILE)
    results = latest_results(events)
    for section, name in done(events):
        is_failed_again = results[section, name]["status"] == FAILED and (FAILED in wanted or section in GATES)
        if (section in wanted and re.search(match, name)) or is_failed_again:
            log.emit("again", section=section, name=name)


def _run(options: argparse.Namespace) -> int:
    started_s = time.time()
    if options.shape:
        from benchmarks.device.tune import check_shape

        check_shape(options.shape)
    machine: dict[str, Any] = {"gpu": {"name": "cpu"} if options.smoke else gpu(), **facts(options.commit)}
    _check_folder(options.out)
    name = f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}"
    log = EventLog(options.out / EVENTS_FILE, name)
    _merge(log, options.merge)
    forget(log, options.out, options.again, options.match)
    log.emit("run", machine=machine, only=options.only, budget_s=options.budget_s, smoke=options.smoke)
    sections = [section for section in SECTIONS if section.name in options.only]
    report = functools.partial(write_report, options.out)
    with worker_environment(options.wheels, options.smoke) as environment, nullcontext() if options.smoke else watched_gpu(log):
        run = Run(options.out, name, started_s + options.budget_s, options.smoke, options.match, options.shape, environment)
        problem = run_sections(sections, run, report)
    results = latest_results(read_events(options.out / EVENTS_FILE)).values()
    failed = sum(result["status"] == FAILED for result in results)
    print(f"{options.out}: {len(results)} results, {failed} failed, {time.time() - started_s:.0f} s")
    if problem is not None:
        print(f"stopped: {problem}", file=sys.stderr)
    return 1 if failed or problem else 0


def main() -> int:
    options = _parser().parse_args()
    try:
        if options.report:
            _check_folder(options.out)
            _merge(EventLog(options.out / EVENTS_FILE, "report"), options.merge)
            write_report(options.out)
            return 0
        return _run(options)
    except UnfitMachineError as error:
        print(f"benchmarks.device: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # In the end of a run everything is on disk; what a library leaves running must not keep the machine.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
