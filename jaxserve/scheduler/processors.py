"""Processors: changes the logits of rows whose request brought code of its own, between a step's two halves.

The code sees what has been sampled so far, so a step with such rows is sampled when the results of the steps before it that
name them are in, as with grammars. What goes wrong with a request's code ends that request; its row is sampled like any other
and dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.logit_processors import ProcessorError, ProcessorHost
from jaxserve.runner import LogitLines, Runner, StepInput
from jaxserve.scheduler.constraints import known_drafts
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.rows import RowFlag, RowTable
from jaxserve.types import FinishReason, ForwardMode


class Processors:
    def __init__(
        self, host: ProcessorHost, runner: Runner, table: RowTable, finish: Callable[[Req, FinishReason], None]
    ) -> None:
        self._host = host
        self._runner = runner
        self._table = table
        self._finish = finish

    def apply(self, step: StepInput, handle: Any) -> LogitLines | None:
        """For Runner.sample. The results of earlier steps that name a row with code must have been processed. Ends requests."""
        table, rows = self._table, step.rows
        is_wanted = step.sample & table.alive[rows] & ~table.drops[rows]
        places = (is_wanted & ((table.flags[rows] & RowFlag.PROCESSOR) != 0)).nonzero()[0].tolist()
        if not places:
            return None
        per_row = self._runner.spec.num_draft_tokens if step.mode is ForwardMode.DECODE else 1
        drafts = [known_drafts(table, step, int(rows[place])) for place in places]
        lines = [place * per_row + np.arange(len(tokens) + 1) for place, tokens in zip(places, drafts, strict=True)]
        logits = self._runner.read_logits(handle, np.concatenate(lines).astype(np.int32))
        changed: list[tuple[np.ndarray, np.ndarray]] = []  # lines of a row, and their logits
        ended_process: set[bytes] = set()  # codes
        first = 0
        for place, tokens, of_row in zip(places, drafts, lines, strict=True):
            own = logits[first : first + len(of_row)]
            first += len(of_row)
            req = table.req(int(rows[place]))
            result = self._call(req, tokens, own, ended_process)
            if result is not None:
                changed.append((of_row, result))
        if not changed:
            return None
        all_lines, all_logits = map(np.concatenate, zip(*changed, strict=True))
        return LogitLines(all_lines.astype(np.int32), all_logits)

    def _call(self, req: Req, drafts: list[int], logits: np.ndarray, ended_process: set[bytes]) -> np.ndarray | None:
        processor = req.processor
        assert processor is not None
        outputs = np.concatenate([self._table.output_ids(req.row), np.array(drafts, np.int32)])
        try:
            if processor.code in ended_process:  # once a step is enough: everybody waits
                raise ProcessorError("custom_logit_processor has just ended the process that runs it, or took too long.")
            return self._host.apply(processor, req.rid, req.prompt_ids, outputs, logits)
        except ProcessorError as error:
            if error.ended_process:
                ended_process.add(processor.code)
            err_type = "BadRequestError" if error.status_code == 400 else "InternalServerError"
            self._finish(req, FinishReason.abort(str(error), error.status_code, err_type))
            return None

    def close(self) -> None:
        self._host.close()
