"""Requests made from /openapi.json, right and wrong ones, to a real server for minutes: none may be a server error.

    python -m benchmarks.abuse.api --minutes 10 [--seed 1] [--out FOLDER]      `make fuzz-api`

schemathesis makes them, one operation after the other, and no two rounds the same. A 5xx that a server is not meant to give, a
status that no operation has, a refusal without a sentence, no reply within a minute, a traceback in the log, or a server that
is not whole after a round: exit status 1. tests/server/test_http_schema.py is the same with a fake engine, for seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import APIOperation, Case, GenerationMode

from benchmarks.abuse.arena import is_sentence
from benchmarks.abuse.subject import Subject
from benchmarks.abuse.tally import Tally
from jaxserve.demo import demo_model_path

# 503 is judged by what it says; 401 and 403 need keys, which this server has not.
_STATUSES = {200, 400, 404, 405, 413, 503}
_TIMEOUT_S = 60
_EXAMPLES = 12  # of one operation before the next
# Short answers: what is tried is requests.
_SERVER = ("--context-length", "256", "--max-total-tokens", "8192", "--enable-return-hidden-states")
# It writes files where the request says.
_LEFT_OUT = ("/configure_logging", "/start_profile")
# What is done after an operation that holds others up.
_UNDO: dict[str, tuple[str, dict[str, Any]]] = {
    "/block_input": ("/unblock_input", {}),
    "/pause_generation": ("/continue_generation", {}),
    "/release_memory_occupation": ("/resume_memory_occupation", {}),
    "/slow_down": ("/slow_down", {"forward_sleep_time": None}),
}

Operation = APIOperation[Any, Any, Any, Any]


class ApiFuzz:
    def __init__(self, subject: Subject, tally: Tally, first_seed: int) -> None:
        self.rounds = 0
        self._subject = subject
        self._tally = tally
        self._seed = first_seed
        self._url = f"http://127.0.0.1:{subject.port}"

    async def run(self, seconds: float) -> None:
        await self._subject.start()
        settings_before = await self._settings()
        deadline_s = time.monotonic() + seconds
        operations = list(self._operations())
        while time.monotonic() < deadline_s:
            for operation in operations:
                for mode in GenerationMode:
                    if time.monotonic() < deadline_s:
                        await asyncio.to_thread(self._try, operation, mode)
                if operation.path == "/set_internal_state":
                    self._post(operation.path, {"server_args": settings_before})
            self.rounds += 1
            wrong = await self._subject.whole()
            if wrong is not None:
                self._tally.fail("server", "not whole after a round", wrong)
            print(f"round {self.rounds}: {self._tally.requests()} requests", file=sys.stderr, flush=True)

    async def close(self) -> None:
        if self._subject.process is not None and (status := await self._subject.stop()) != 0:
            self._tally.fail("server", f"exit {status} after SIGTERM", str(self._subject.log))
        for last, trace in self._subject.traces():
            self._tally.fail("log", f"a traceback: {last}", trace)

    async def _settings(self) -> dict[str, Any]:
        state = await self._subject.state()
        return {name: state[name] for name in ("request_waiting_timeout_s", "request_running_timeout_s", "max_queued_requests")}

    def _operations(self) -> Iterator[Operation]:
        for found in schemathesis.openapi.from_url(self._url + "/openapi.json").get_all_operations():
            operation = found.ok()
            if operation.path not in _LEFT_OUT:
                yield operation

    def _try(self, operation: Operation, mode: GenerationMode) -> None:
        if mode is GenerationMode.NEGATIVE and not operation.body and not len(operation.query):
            return  # nothing can be wrong
        self._seed += 1

        @seed(self._seed)
        @settings(
            max_examples=_EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def call(case: Case) -> None:
            self._send(operation.label, case)

        call()
        if operation.path in _UNDO:
            self._post(*_UNDO[operation.path])

    def _send(self, kind: str, case: Case) -> None:
        try:
            reply = case.call(base_url=self._url, timeout=_TIMEOUT_S)
        except (requests.RequestException, OSError) as error:
            self._tally.fail(kind, f"no reply: {type(error).__name__}", case.as_curl_command())
            return
        sent = case.as_curl_command().encode(errors="replace")
        self._tally.note_status(kind, reply.status_code, reply.content, sent)
        if reply.status_code not in _STATUSES and reply.status_code < 500:
            self._tally.fail(kind, f"status {reply.status_code}", f"{reply.content[:250]!r} to {sent[:300]!r}")
        if reply.status_code in (400, 413) and not is_sentence(reply.content):
            self._tally.fail(kind, "a refusal without a sentence", f"{reply.content[:250]!r} to {sent[:300]!r}")

    def _post(self, path: str, body: dict[str, Any]) -> None:
        reply = requests.post(self._url + path, json=body, timeout=_TIMEOUT_S)
        if reply.status_code != 200:
            self._tally.fail(path, f"status {reply.status_code} when things were put back", reply.text[:250])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.abuse.api", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, help="folder for the log and the report; default: a temporary one")
    parser.add_argument("--model-path", default=demo_model_path())
    parser.add_argument("serve_options", nargs="*", metavar="-- OPTION", help="options of jaxserve serve, after --")
    options = parser.parse_args()
    folder = options.out or pathlib.Path(tempfile.mkdtemp(prefix="fuzz-api-"))
    folder.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    subject = Subject(folder, ["--model-path", options.model_path, *_SERVER, *options.serve_options])
    fuzz = ApiFuzz(subject, tally, 1_000_000 * options.seed)

    async def run() -> None:
        try:
            await fuzz.run(60 * options.minutes)
        finally:
            await fuzz.close()

    try:
        asyncio.run(run())
    finally:
        subject.kill()
    lines = [f"{tally.requests()} requests in {fuzz.rounds} rounds", ""]
    lines += [f"  {kind:44} " + json.dumps(dict(counts)) for kind, counts in sorted(tally.outcomes.items())]
    lines += ["", f"5xx that were meant: {dict(tally.meant_5xx) or 'none'}"]
    lines += [f"FAILED {name} ({count} times)" for name, count in tally.failures.most_common()]
    lines += [f"    {example.kind}: {example.what}: {example.evidence}" for example in tally.examples]
    lines += ["", "failed" if tally.failures else "passed"]
    (folder / "report.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"report and log: {folder}", file=sys.stderr)
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
