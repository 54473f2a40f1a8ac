"""Reversible: commands to a runner of which the newest can be taken back, because it failed on another host.

Those of adapters run beside any others, so they do not count there: an adapter that was read here can be forgotten at any time.
"""

from __future__ import annotations

from concurrent.futures import Future

from jaxserve.commands import (
    AdapterCommand,
    Command,
    ForgetAdapter,
    MemoryTag,
    ReadAdapter,
    ReleaseMemory,
    ReplaceWeights,
    ResumeMemory,
    StartProfile,
    StopProfile,
)
from jaxserve.runner import Runner


class Reversible:
    def __init__(self, runner: Runner, model_path: str, load_format: str) -> None:
        """`model_path` and `load_format` say where the runner's weights are from."""
        self._runner = runner
        self._weights = ReplaceWeights(model_path, load_format)
        self._released: set[MemoryTag] = set()
        self._adapters: set[int] = set()  # that were read
        self._way_back: list[Command] = []

    def forget(self) -> None:
        """There is nothing to take back."""
        self._way_back = []

    def execute(self, command: Command) -> Future[None]:
        """As `Runner.execute`. Who hears that it is done can take it back: by then it is noted."""
        if not isinstance(command, AdapterCommand):
            self.forget()
        noted: Future[None] = Future()

        def note(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                noted.set_exception(error)
                return
            self._note(command)
            noted.set_result(None)

        self._runner.execute(command).add_done_callback(note)
        return noted

    def undo(self) -> list[Future[None]]:
        """Starts what takes the newest command back; nothing if it was refused, or changed nothing."""
        return [self.execute(command) for command in self._way_back]

    def undo_reading(self, adapter_id: int) -> list[Future[None]]:
        """Nothing if it was refused."""
        return [self.execute(ForgetAdapter(adapter_id))] if adapter_id in self._adapters else []

    def _note(self, command: Command) -> None:
        match command:
            case ReplaceWeights():
                self._way_back = [self._weights]
                if "weights" in self._released:
                    self._way_back.append(ReleaseMemory(("weights",)))
                    self._released.remove("weights")
                self._weights = command
            case ReleaseMemory(tags):
                self._way_back = [ResumeMemory(tags)]
                self._released |= set(tags)
            case ResumeMemory(tags):
                self._way_back = [ReleaseMemory(tags)]
                self._released -= set(tags)
            case ReadAdapter(adapter_id):
                self._adapters.add(adapter_id)
            case ForgetAdapter(adapter_id):
                self._adapters.discard(adapter_id)
            case StartProfile():
                self._way_back = [StopProfile()]
