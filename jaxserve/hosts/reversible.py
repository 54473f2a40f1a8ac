"""Reversible: commands to a runner of which the newest can be taken back, because it failed on another host."""

from __future__ import annotations

from concurrent.futures import Future

from jaxserve.runner import Command, MemoryTag, ReleaseMemory, ReplaceWeights, ResumeMemory, Runner, StartProfile, StopProfile


class Reversible:
    def __init__(self, runner: Runner, model_path: str, load_format: str) -> None:
        """`model_path` and `load_format` say where the runner's weights are from."""
        self._runner = runner
        self._weights = ReplaceWeights(model_path, load_format)
        self._released: set[MemoryTag] = set()
        self._way_back: list[Command] = []

    def forget(self) -> None:
        """There is nothing to take back."""
        self._way_back = []

    def execute(self, command: Command) -> Future[None]:
        """As `Runner.execute`. Who hears that it is done can take it back: by then it is noted."""
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
            case StartProfile():
                self._way_back = [StopProfile()]
