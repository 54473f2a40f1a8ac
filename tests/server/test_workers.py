"""Worker processes: readiness, the ways they can end, and that none is left behind. Real processes throughout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jaxserve.config import ServerArgs
from jaxserve.messages import DETOKENIZER, SCHEDULER, TOKENIZER, TokenizerInput, WorkerAddress
from jaxserve.server.process_worker import WorkerCommand, exit_text
from jaxserve.server.worker import WorkerDiedError
from jaxserve.server.workers import WorkerGroup, between_processes, default_commands

SCRIPT = """
import os, sys, time, signal
from jaxserve.server.worker_process import UserError, run_worker
from jaxserve.messages import TOKENIZER, WorkerAddress, WorkerReady
def ready(context):
    context.channels.send_once(WorkerAddress(TOKENIZER), WorkerReady(worker=context.address, info=dict(pid=os.getpid())))
def work(context):
    {body}
sys.exit(run_worker({name!r}, work))
"""


def command(tmp_path: Path, name: str, body: str) -> WorkerCommand:
    """A worker whose work is `body`."""
    script = tmp_path / f"{name}.py"
    indented = textwrap.indent(textwrap.dedent(body).strip(), "    ").strip()
    script.write_text(SCRIPT.replace("{name!r}", repr(name)).replace("{body}", indented))
    return WorkerCommand(name, (sys.executable, str(script)))


class Harness:
    """A group and the reading end of its messages, on the running loop."""

    def __init__(self, *commands: WorkerCommand) -> None:
        self.open = contextlib.ExitStack()
        self.channels = self.open.enter_context(between_processes(ServerArgs(model_path="m")))
        self.inbox = self.channels.inbox(WorkerAddress(TOKENIZER), TokenizerInput)
        self.group = WorkerGroup(commands)

    async def __aenter__(self) -> WorkerGroup:
        self.group.start(self.channels)
        self.reader = asyncio.create_task(self._read())
        return self.group

    async def _read(self) -> None:
        while True:
            for message in self.inbox.receive():
                self.group.receive(message)
            await asyncio.sleep(0.01)

    async def __aexit__(self, *error: object) -> None:
        await self.group.kill()
        self.reader.cancel()
        self.inbox.close()
        self.open.close()
        for pid in self.group.pids().values():
            assert not psutil.pid_exists(pid), f"worker {pid} is still in the process table"


async def test_ready_when_all_are_ready_and_stop_waits_for_them(tmp_path: Path) -> None:
    body = "ready(context)\nwhile not os.path.exists(str(context.folder / 'go')): time.sleep(0.01)"
    async with (harness := Harness(command(tmp_path, "a", body), command(tmp_path, "b", body))) as group:
        info = await asyncio.wait_for(group.wait_ready(), 30)
        assert {worker: one["pid"] for worker, one in info.items()} == group.pids()
        (harness.channels.folder / "go").touch()
        assert await group.stop(timeout_s=20)


async def test_workers_of_one_kind_are_told_apart(tmp_path: Path) -> None:
    body = """
        ready(context)
        while not os.path.exists(str(context.folder / 'go')): time.sleep(0.01)
        if context.address.rank: raise RuntimeError('no device')
        time.sleep(600)
    """
    first = command(tmp_path, "w", body)
    async with (harness := Harness(first, WorkerCommand(first.kind, first.argv, rank=1))) as group:
        info = await asyncio.wait_for(group.wait_ready(), 30)
        assert set(info) == {WorkerAddress("w", 0), WorkerAddress("w", 1)}
        assert {worker: one["pid"] for worker, one in info.items()} == group.pids()
        (harness.channels.folder / "go").touch()
        death = await asyncio.wait_for(group.watch(), 30)
        assert str(death) == "The w 1 process failed: RuntimeError: no device"


async def test_stop_kills_what_does_not_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Harness(command(tmp_path, "stubborn", "ready(context)\ntime.sleep(600)")) as group:
        await asyncio.wait_for(group.wait_ready(), 30)
        assert not await group.stop(timeout_s=0.2)
        assert "did not end within 0.2 s" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_workers_ignore_signals_meant_for_the_parent(tmp_path: Path, number: signal.Signals) -> None:
    async with Harness(command(tmp_path, "w", "ready(context)\ntime.sleep(600)")) as group:
        await asyncio.wait_for(group.wait_ready(), 30)
        os.kill(group.pids()[WorkerAddress("w")], number)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(group.watch(), 0.3)


CASES = {
    "user error": ("raise UserError('--dtype is wrong.')", "--dtype is wrong.", True),
    "exception": ("raise RuntimeError('no device')", "The w process failed: RuntimeError: no device", False),
    "silent exit": ("print('bye'); sys.stdout.flush(); os._exit(7)", "ended with exit status 7. Its last output:\nbye", False),
    "controls": ("print('\\x1b[2J\\u2028ü'); sys.stdout.flush(); os._exit(7)", "last output:\n\\x1b[2J\\u2028ü", False),
    "zero exit": ("return", "The w process ended with exit status 0.", False),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL (out of memory?)", False),
}


@pytest.mark.parametrize("case", CASES)
async def test_the_reason_of_an_end_before_ready(tmp_path: Path, case: str) -> None:
    body, reason, is_user_error = CASES[case]
    healthy = command(tmp_path, "healthy", "ready(context)\ntime.sleep(600)")
    async with Harness(healthy, command(tmp_path, "w", body)) as group:
        with pytest.raises(WorkerDiedError) as caught:
            await asyncio.wait_for(group.wait_ready(), 30)
        assert reason in str(caught.value)
        assert caught.value.is_user_error == is_user_error


async def test_watch_names_the_worker_that_was_killed(tmp_path: Path) -> None:
    body = "ready(context)\ntime.sleep(600)"
    async with Harness(command(tmp_path, "a", body), command(tmp_path, "b", body)) as group:
        await asyncio.wait_for(group.wait_ready(), 30)
        watch = asyncio.create_task(group.watch())
        os.kill(group.pids()[WorkerAddress("b")], signal.SIGSEGV)
        death = await asyncio.wait_for(watch, 10)
        assert "The b process was ended by SIGSEGV" in str(death)


def test_a_command_for_each_replica_and_each_detokenizer() -> None:
    workers = [command.address for command in default_commands(ServerArgs(device="cpu", dp_size=2, detokenizer_worker_num=3))]
    replicas, detokenizers = [(SCHEDULER, 0), (SCHEDULER, 1)], [(DETOKENIZER, 0), (DETOKENIZER, 1), (DETOKENIZER, 2)]
    assert workers == [WorkerAddress(*one) for one in (*replicas, *detokenizers)]


def test_exit_text_of_odd_codes() -> None:
    assert exit_text(None) == "is still running"
    assert exit_text(-250) == "was ended by signal 250"


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a worker, prints its pid, and waits."""
    worker = command(tmp_path, "w", "ready(context)\ntime.sleep(600)")
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio
            from jaxserve.config import ServerArgs
            from jaxserve.messages import WorkerAddress
            from jaxserve.server.process_worker import WorkerCommand
            from jaxserve.server.workers import WorkerGroup, between_processes
            async def main():
                with between_processes(ServerArgs(model_path="m")) as channels:
                    group = WorkerGroup([WorkerCommand("w", {worker.argv!r})])
                    group.start(channels)
                    print(group.pids()[WorkerAddress("w")], flush=True)
                    await asyncio.sleep(600)
            asyncio.run(main())
            """
        )
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("delay_s", [0.0, 1.5])
def test_a_killed_parent_leaves_no_orphan(parent: subprocess.Popen[str], delay_s: float) -> None:
    """Also when it dies while the worker is still starting."""
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(delay_s)
    parent.kill()
    parent.wait()
    deadline_s = time.monotonic() + 15
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "the worker outlived its parent"
        time.sleep(0.05)
