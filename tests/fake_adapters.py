"""FakeAdapters: the LoRA adapters of a fake runner. One is a number, made from its folder's name, that goes into the hash of a
row's tokens; KV bears that number, too, and no row may read another's.

A folder whose name begins with "bad" cannot be read, nor can those of `broken`. Readings take
`delay_s`, and wait for `may_read`.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import zlib

from jaxserve.commands import AdapterCommand, CommandError, ForgetAdapter, ReadAdapter
from jaxserve.runner import NO_SLOT, RunnerSpec, StepInput


def adapter_number(path: str) -> int:
    return 1 + zlib.crc32(f"adapter {path}".encode())


class FakeAdapters:
    def __init__(self, spec: RunnerSpec) -> None:
        self._slots: list[ReadAdapter | None] = [None] * spec.num_adapter_slots
        self._of_row: list[ReadAdapter | None] = [None] * spec.max_rows
        self._slot_of_row = [NO_SLOT] * spec.max_rows
        self._seen: set[int] = set()  # ids that were given
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "fake-adapters")
        self.delay_s = 0.0
        self.may_read = threading.Event()
        self.may_read.set()
        self.broken: set[str] = set()
        self.in_memory: dict[int, ReadAdapter] = {}
        self.most_in_memory = 0
        self.num_loads = 0

    def close(self) -> None:
        self.may_read.set()
        self._worker.shutdown()

    def execute(self, command: AdapterCommand) -> concurrent.futures.Future[None]:
        """Beside the steps."""
        return self._worker.submit(self._carry_out, command)

    def _carry_out(self, command: AdapterCommand) -> None:
        if isinstance(command, ForgetAdapter):
            del self.in_memory[command.adapter_id]
            return
        assert command.adapter_id not in self._seen, f"adapter id {command.adapter_id} is given again"
        self._seen.add(command.adapter_id)
        assert self.may_read.wait(60)
        time.sleep(self.delay_s)
        if command.path.startswith("bad") or command.path in self.broken:
            raise CommandError(f"{command.path} holds no adapter.")
        self.in_memory[command.adapter_id] = command
        self.most_in_memory = max(self.most_in_memory, len(self.in_memory))

    # --- steps

    def enter(self, step: StepInput) -> None:
        """Before the step's rows begin: what it loads, and what its rows run with."""
        slots = [load.slot for load in step.adapter_loads]
        assert len(set(slots)) == len(slots), f"a step loads twice into a slot: {slots}"
        for load in step.adapter_loads:
            assert 0 <= load.slot < len(self._slots), f"slot {load.slot} of {len(self._slots)}"
            assert load.adapter_id in self.in_memory, f"adapter {load.adapter_id} is loaded and was not read"
            self._slots[load.slot] = self.in_memory[load.adapter_id]
            self.num_loads += 1
        for state in step.new_rows:
            self._slot_of_row[state.row] = state.adapter_slot
            self._of_row[state.row] = self._in_slot(state.adapter_slot)
            assert (state.adapter_slot == NO_SLOT) == (self._of_row[state.row] is None), f"slot {state.adapter_slot} is empty"
        for row in step.rows.tolist():
            assert self._in_slot(self._slot_of_row[row]) is self._of_row[row], f"row {row} lost its adapter"

    def _in_slot(self, slot: int) -> ReadAdapter | None:
        return None if slot == NO_SLOT else self._slots[slot]

    def seed(self, row: int) -> int:
        adapter = self._of_row[row]
        return 0 if adapter is None else adapter_number(adapter.path)

    def writer(self, row: int) -> int:
        """Whose KV it is."""
        return self.seed(row) << 30
