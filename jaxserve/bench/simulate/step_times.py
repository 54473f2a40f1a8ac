"""How long a step takes: from a few numbers, or from what `jaxserve bench latency` measured on a device."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxserve.bench.record import kind_of
from jaxserve.runner import StepInput


class StepTimes(Protocol):
    def __call__(self, step: StepInput) -> float:
        """Seconds that the device is busy with it."""
        ...


@dataclasses.dataclass(frozen=True)
class LinearStepTimes:
    """Seconds of any step, and of what is in it. The defaults are about those of an 8B model on an H100."""

    step_s: float = 0.008
    prefill_token_s: float = 5e-5
    decode_row_s: float = 2e-5
    context_token_s: float = 0.0  # of each token that decode rows look back at

    def __call__(self, step: StepInput) -> float:
        rows = step.num_decode_rows
        looked_at = int(step.seq_lens[:rows].sum()) if self.context_token_s else 0
        prompts = self.prefill_token_s * len(step.input_ids)
        return self.step_s + prompts + self.decode_row_s * rows + self.context_token_s * looked_at


@dataclasses.dataclass(frozen=True)
class MeasuredStepTimes:
    """Between what was measured; a step takes as long as the bucket that it is padded to."""

    decode_rows: tuple[int, ...]  # that were measured, increasing
    decode_s: tuple[float, ...]  # of each, without what looking back takes
    context_token_s: float  # of each token that decode rows look back at
    prefill_tokens: tuple[int, ...]
    prefill_s: tuple[float, ...]
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()

    def __call__(self, step: StepInput) -> float:
        rows = step.num_decode_rows
        back_s = self.context_token_s * int(step.seq_lens[:rows].sum())
        if not len(step.input_ids):
            return back_s + float(np.interp(_padded(rows, self.row_buckets), self.decode_rows, self.decode_s))
        tokens = _padded(rows + len(step.input_ids), self.token_buckets)
        longest, longest_s = self.prefill_tokens[-1], self.prefill_s[-1]
        if tokens > longest:
            return back_s + longest_s * tokens / longest
        return back_s + float(np.interp(tokens, self.prefill_tokens, self.prefill_s))

    @staticmethod
    def of_records(records: Iterable[Mapping[str, Any]]) -> MeasuredStepTimes:
        """From the lines of `jaxserve bench latency --output-file`, all of one model and one set of options. ValueError if they
        are too few."""
        cases = [record for record in records if kind_of(record) == "latency"]
        if not cases:
            raise ValueError("There is no record of `jaxserve bench latency` in the file.")
        options = cases[-1]["server_args"]
        row_buckets, token_buckets = tuple(options["decode_row_buckets"]), tuple(options["prefill_token_buckets"])
        prompts: dict[int, list[float]] = {}
        for case in cases:
            tokens = case["batch_size"] * case["input_len"]
            if tokens <= token_buckets[-1]:  # one step
                prompts.setdefault(_padded(tokens, token_buckets), []).append(case["prefill_latency"])
        if not prompts:
            raise ValueError(f"No record is of prompts that fit one step of {token_buckets[-1]} tokens.")
        decode, context_token_s = _fit_decode(cases)
        return MeasuredStepTimes(
            tuple(decode), tuple(decode.values()), context_token_s,
            tuple(sorted(prompts)), tuple(float(np.median(prompts[tokens])) for tokens in sorted(prompts)),
            row_buckets, token_buckets,
        )  # fmt: skip


def _padded(size: int, buckets: Sequence[int]) -> int:
    place = bisect.bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else size


def _fit_decode(cases: Sequence[Mapping[str, Any]]) -> tuple[dict[int, float], float]:
    """Seconds by rows, and of each token looked back at: least squares over all that was measured."""
    sizes = sorted({case["batch_size"] for case in cases})
    lines = np.zeros((len(cases), len(sizes) + 1))
    for line, case in zip(lines, cases, strict=True):
        line[sizes.index(case["batch_size"])] = 1.0
        line[-1] = case["batch_size"] * (case["input_len"] + case["output_len"] / 2)
    times = np.array([case["median_decode_latency"] for case in cases])
    *of_sizes, back = np.linalg.lstsq(lines, times, rcond=None)[0].tolist()
    if back < 0 or len(cases) == len(sizes):  # nothing says what contexts cost
        back, of_sizes = 0.0, [float(np.median(times[lines[:, place] == 1.0])) for place in range(len(sizes))]
    return dict(zip(sizes, of_sizes, strict=True)), back
