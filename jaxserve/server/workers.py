"""Starting worker processes, waiting until they are ready, and noticing when one ends.

Workers are plain subprocesses. What they write goes on to this process's stderr, and its last lines are kept: they are the
reason given when a worker ends without last words. The group knows nothing of requests; `jaxserve.server.pipeline` says when
to stop.
"""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import logging
import os
import signal
import site
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.ipc import IpcPaths
from jaxserve.messages import DETOKENIZER, FRONT, SCHEDULER, WorkerAddress, WorkerFailed, WorkerReady
from jaxserve.progress import CLEAR_LINE, for_workers
from jaxserve.server.logs import escaped_output, log_lines
from jaxserve.server.output_routes import fronts_of
from jaxserve.server.replica_devices import replica_environment
from jaxserve.server.worker_process import SHOW_STACKS

logger = logging.getLogger(__name__)

_TAIL_LINES = 20
# After a worker ended: how long its last words may take to arrive by the socket.
_LAST_WORDS_S = 0.3
# After SIGKILL: how long a process may take to be gone.
_KILL_GRACE_S = 20.0


class WorkerDiedError(Exception):
    """A worker ended although nobody asked it to. The text is the reason, for the operator."""

    def __init__(
        self,
        reason: str,
        for_clients: str = "The server failed.",
        *,
        is_user_error: bool = False,
        worker: WorkerAddress | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(reason)
        self.status = status  # its process's
        self.worker = worker
        self.for_clients = for_clients
        self.is_user_error = is_user_error  # an option or a file the user can mend


@dataclasses.dataclass(frozen=True)
class WorkerCommand:
    """How to start one worker: `argv` is followed by the ipc folder, this process's id, the worker's rank and its start."""

    kind: str
    argv: tuple[str, ...]
    rank: int = 0
    start: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)  # beside ours

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.kind, self.rank, self.start)

    @staticmethod
    def of_module(kind: str, module: str, rank: int = 0) -> WorkerCommand:
        # -P: a file in the current folder must not shadow a module of ours.
        return WorkerCommand(kind, (sys.executable, "-P", "-m", module), rank)


def default_commands(args: ServerArgs) -> tuple[WorkerCommand, ...]:
    """Raises ValueError if the devices there are cannot be divided among the replicas."""
    scheduler = WorkerCommand.of_module(SCHEDULER, "jaxserve.server.scheduler_process")
    return (
        *(
            dataclasses.replace(scheduler, rank=rank, env=replica_environment(args, rank, os.environ))
            for rank in range(args.dp_size)
        ),
        *(
            WorkerCommand.of_module(DETOKENIZER, "jaxserve.server.detokenizer", rank)
            for rank in range(args.detokenizer_worker_num)
        ),
    )


def front_commands(args: ServerArgs) -> tuple[WorkerCommand, ...]:
    """None if the main process is the only one with HTTP."""
    return tuple(WorkerCommand.of_module(FRONT, "jaxserve.server.fronts.process", front.rank) for front in fronts_of(args))


class _Worker:
    """One running worker and the two threads that serve it: one copies its output, one waits for its end."""

    def __init__(self, command: WorkerCommand, paths: IpcPaths) -> None:
        self.address = command.address
        self.tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
        self.last_words: WorkerFailed | None = None
        # The signal would end it until it has learned what to do: it inherits the mask, and lifts it then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {SHOW_STACKS})
        try:
            # A session of its own: Ctrl-C in the terminal is for the main process, which then tells the workers.
            self.process = subprocess.Popen(
                [*command.argv, str(paths.folder), str(os.getpid()), str(command.rank), str(command.start)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**_environment(), **command.env},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._copier = threading.Thread(target=self._copy_output, name=f"{self.address}-output", daemon=True)
        self._copier.start()

    def notify_exit(self, loop: asyncio.AbstractEventLoop, exited: Callable[[], None]) -> None:
        """Calls `exited` on `loop` when the process has ended and its output is complete."""

        def wait() -> None:
            self.process.wait()
            self._copier.join(timeout=1.0)  # a grandchild could hold the pipe open
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is interested any more
                loop.call_soon_threadsafe(exited)

        threading.Thread(target=wait, name=f"{self.address}-exit", daemon=True).start()

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            rest = ""
            while data := os.read(pipe.fileno(), 1 << 16):
                # As it comes, not by lines: progress bars redraw theirs.
                text = escaped_output(decoder.decode(data))
                with contextlib.suppress(OSError, ValueError):  # our own stderr may be gone; the worker must not block on that
                    sys.stderr.write(text)
                    sys.stderr.flush()
                *lines, rest = (rest + text).split("\n")
                self.tail.extend(map(_last_state, lines))
            if rest:
                self.tail.append(_last_state(rest))

    def obituary(self) -> WorkerDiedError:
        """Why it ended, in the best words there are."""
        for_clients = f"The server's {self.address} process ended."
        if self.last_words is not None:
            words = self.last_words
            reason = words.error if words.is_user_error else f"The {self.address} process failed: {words.error}"
            return self._death(reason, for_clients, is_user_error=words.is_user_error)
        tail = "\n".join(line for line in self.tail if line.strip())
        said = f" Its last output:\n{tail}" if tail else ""
        reason = f"The {self.address} process {exit_text(self.process.returncode)}.{said}"
        return self._death(reason, for_clients)

    def _death(self, reason: str, for_clients: str, *, is_user_error: bool = False) -> WorkerDiedError:
        status = self.process.returncode
        return WorkerDiedError(reason, for_clients, is_user_error=is_user_error, worker=self.address, status=status)


class WorkerGroup:
    """All workers of one engine. Lives on one asyncio loop."""

    def __init__(self, commands: Sequence[WorkerCommand]) -> None:
        self._commands = {command.address: command for command in commands}
        self._paths: IpcPaths | None = None
        self._workers: dict[WorkerAddress, _Worker] = {}
        self._exits: dict[WorkerAddress, asyncio.Event] = {}
        self._ready: dict[WorkerAddress, WorkerReady] = {}
        self._changed = asyncio.Event()  # a worker became ready, spoke its last words, or ended

    def start(self, paths: IpcPaths) -> None:
        """Starts the processes. The calling thread must outlive them: the kernel ends them with the thread that began them."""
        self._paths = paths
        for command in self._commands.values():
            self._start(command)

    def start_again(self, worker: WorkerAddress) -> WorkerAddress:
        """A process in place of one that has ended; on the thread that `start` was called on. Returns its address."""
        command = self._commands.pop(worker)
        command = dataclasses.replace(command, start=command.start + 1)
        self._commands[command.address] = command
        self._start(command)
        return command.address

    def _start(self, command: WorkerCommand) -> None:
        assert self._paths is not None, "start comes first"
        worker, exited = _Worker(command, self._paths), asyncio.Event()
        self._workers[command.address], self._exits[command.address] = worker, exited

        def note_exit() -> None:
            exited.set()
            self._changed.set()

        worker.notify_exit(asyncio.get_running_loop(), note_exit)

    def bury(self, worker: WorkerAddress) -> None:
        """One that has ended, and whose end is dealt with."""
        del self._workers[worker], self._exits[worker]
        self._ready.pop(worker, None)

    @property
    def addresses(self) -> list[WorkerAddress]:
        return list(self._commands)

    @property
    def alive(self) -> list[WorkerAddress]:
        return [address for address, exited in self._exits.items() if not exited.is_set()]

    def pids(self) -> dict[WorkerAddress, int]:
        return {address: worker.process.pid for address, worker in self._workers.items()}

    def receive(self, event: WorkerReady | WorkerFailed) -> None:
        """A worker's message about itself."""
        if event.worker not in self._workers:
            logger.error("%s from an unknown worker %s.", type(event).__name__, event.worker)
            return
        if isinstance(event, WorkerReady):
            self._ready[event.worker] = event
        else:
            self._workers[event.worker].last_words = event
        self._changed.set()

    async def wait_ready(self, worker: WorkerAddress | None = None) -> dict[WorkerAddress, dict[str, Any]]:
        """What each worker, or this one, said when it became ready. Raises WorkerDiedError if one ends first."""
        wanted = self.addresses if worker is None else [worker]
        while not all(address in self._ready for address in wanted):
            if any(self._exits[address].is_set() for address in wanted):
                raise await self._obituary(wanted)
            await self._change()
        return {address: self._ready[address].info for address in wanted}

    async def watch(self) -> WorkerDiedError:
        """Returns when a worker has ended, with its reason. Of several, the one that spoke."""
        while len(self.alive) == len(self._exits):
            await self._change()
        return await self._obituary(list(self._exits))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _obituary(self, addresses: Sequence[WorkerAddress]) -> WorkerDiedError:
        await self._wait_for_last_words()
        ended = [self._workers[address] for address in addresses if self._exits[address].is_set()]
        return next((worker for worker in ended if worker.last_words), ended[0]).obituary()

    async def _wait_for_last_words(self) -> None:
        """They come by another way than the exit and may be later."""
        deadline_s = asyncio.get_running_loop().time() + _LAST_WORDS_S
        while asyncio.get_running_loop().time() < deadline_s:
            if any(self._workers[address].last_words for address, event in self._exits.items() if event.is_set()):
                return
            await asyncio.sleep(0.01)

    async def wait_exits(self, workers: Collection[WorkerAddress], timeout_s: float) -> None:
        """Returns when they have ended by themselves, or the time is over."""
        waits = [asyncio.create_task(self._exits[worker].wait()) for worker in workers]
        if waits:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()

    async def stop(self, timeout_s: float) -> bool:
        """Waits for all to end by themselves and kills the rest after `timeout_s`. Returns whether all ended with status 0."""
        await self.wait_exits(list(self._exits), timeout_s)
        await self.kill(f"did not end within {timeout_s:g} s")
        failed = [worker for worker in self._workers.values() if worker.process.returncode]
        for worker in failed:
            log_lines(logger, logging.ERROR, str(worker.obituary()))
        return not failed

    def show_stacks(self) -> None:
        """Asks all for the stacks of their threads, on stderr."""
        for worker in self._workers.values():
            if worker.process.poll() is None:
                worker.process.send_signal(SHOW_STACKS)

    async def kill(self, reason: str | None = None, only: Collection[WorkerAddress] | None = None) -> None:
        """Ends what still runs, at once; returns when all, or only these, are gone."""
        chosen = [address for address in self._workers if only is None or address in only]
        for worker in map(self._workers.__getitem__, chosen):
            if worker.process.poll() is None:
                if reason:
                    logger.error("The %s process %s; killing it.", worker.address, reason)
                worker.process.kill()
        exits = [asyncio.create_task(self._exits[address].wait()) for address in chosen]
        if exits:
            _, stuck = await asyncio.wait(exits, timeout=_KILL_GRACE_S)
            for task in stuck:  # in the kernel, such as in a driver call that does not return
                task.cancel()
                logger.error("A killed worker is still in the process table after %g s.", _KILL_GRACE_S)


def _last_state(line: str) -> str:
    """What a terminal would show of a line that was written over."""
    return line.rsplit("\r", 1)[-1].removeprefix(CLEAR_LINE.lstrip("\r"))


def exit_text(code: int | None) -> str:
    if code is None:
        return "is still running"
    if code >= 0:
        return f"ended with exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _environment() -> dict[str, str]:
    """Ours, so that a worker finds the same jaxserve however this process found it."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **for_workers()}
    if root not in site.getsitepackages():
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return environment
