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
        """Seconds that it takes, through all stages."""
        ...

    @property
    def work_ratio(self) -> float:
        """`RunnerSpec.attention_work_ratio`."""
        ...


class StageTimes(Protocol):
    def __call__(self, step: StepInput) -> Sequence[float]:
        """Seconds that each stage of a pipeline is busy with it; of one stage, if there is no pipeline."""
        ...


def evenly(step_times: StepTimes, num_stages: int) -> StageTimes:
    """Stages that take as long as each other."""
    return lambda step: [step_times(step) / num_stages] * num_stages


@dataclasses.dataclass(frozen=True)
class LinearStepTimes:
    """Seconds of any step, and of what is in it. The defaults are about those of an 8B model on an H100."""

    step_s: float = 0.008
    prefill_token_s: float = 5e-5
    decode_row_s: float = 2e-5
    context_token_s: float = 0.0  # of each token that decode rows look back at
    pair_s: float = 0.0  # of a prompt's token and each that it looks at

    @property
    def work_ratio(self) -> float:
        return self.pair_s / self.prefill_token_s if self.prefill_token_s else 0.0

    def __call__(self, step: StepInput) -> float:
        rows = step.num_decode_rows
        looked_at = int(step.seq_lens[:rows].sum()) if self.context_token_s else 0
        prompts = self.prefill_token_s * len(step.input_ids)
        if self.pair_s:
            prompts += self.pair_s * num_pairs(step, rows)
        return self.step_s + prompts + self.decode_row_s * rows + self.context_token_s * looked_at


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds of steps by their size, between those that were measured, and more for each pair of a query and a key."""

    sizes: tuple[int, ...]  # increasing
    seconds: tuple[float, ...]  # of each, without what looking back takes
    pair_s: float

    def __call__(self, size: int, pairs: float) -> float:
        largest = self.sizes[-1]
        base_s = float(np.interp(size, self.sizes, self.seconds)) * max(size / largest, 1.0)
        return base_s + self.pair_s * pairs

    @staticmethod
    def fit(points: Sequence[tuple[int, float, float]]) -> Curve:
        """Through points of size, pairs and seconds, by least squares. Where no size was measured with several numbers of
        pairs, or more of them took less, pairs cost nothing."""
        sizes = sorted({size for size, _, _ in points})
        lines = np.zeros((len(points), len(sizes) + 1))
        for line, (size, pairs, _) in zip(lines, points, strict=True):
            line[sizes.index(size)], line[-1] = 1.0, pairs
        times = np.array([seconds for _, _, seconds in points])
        *bases, pair_s = np.linalg.lstsq(lines, times, rcond=None)[0].tolist()
        if pair_s < 0 or len(points) == len(sizes):
            pair_s, bases = 0.0, [float(np.median(times[lines[:, place] == 1.0])) for place in range(len(sizes))]
        return Curve(tuple(sizes), tuple(bases), pair_s)


@dataclasses.dataclass(frozen=True)
class MeasuredStepTimes:
    """Between what was measured; a step takes as long as the bucket that it is padded to."""

    decode: Curve  # by rows
    prefill: Curve  # by tokens
    row_buckets: tuple[int, ...] = ()
    token_buckets: tuple[int, ...] = ()

    @property
    def work_ratio(self) -> float:
        largest_s = self.prefill.seconds[-1] / self.prefill.sizes[-1]
        return self.prefill.pair_s / largest_s if largest_s else 0.0

    def __call__(self, step: StepInput) -> float:
        rows = step.num_decode_rows
        if not len(step.input_ids):
            return self.decode(padded(rows, self.row_buckets), int(step.seq_lens.sum()))
        return self.prefill(padded(rows + len(step.input_ids), self.token_buckets), num_pairs(step))

    @staticmethod
    def of_records(records: Iterable[Mapping[str, Any]]) -> MeasuredStepTimes:
        """From the lines of `jaxserve bench latency --output-file`, all of one model and one set of options. ValueError if they
        are too few."""
        cases = [record for record in records if kind_of(record) == "latency"]
        if not cases:
            raise ValueError("There is no record of `jaxserve bench latency` in the file.")
        options = cases[-1]["server_args"]
        row_buckets, token_buckets = tuple(options["decode_row_buckets"]), tuple(options["prefill_token_buckets"])
        decode, prefill = [], []
        for case in cases:
            rows, length = case["batch_size"], case["input_len"]
            decode.append((rows, rows * (length + case["output_len"] / 2), case["median_decode_latency"]))
            if rows * length <= token_buckets[-1]:  # one step
                prefill.append((padded(rows * length, token_buckets), rows * length**2 / 2, case["prefill_latency"]))
        if not prefill:
            raise ValueError(f"No record is of prompts that fit one step of {token_buckets[-1]} tokens.")
        return MeasuredStepTimes(Curve.fit(decode), Curve.fit(prefill), row_buckets, token_buckets)


def num_pairs(step: StepInput, first_row: int = 0) -> float:
    """Of a token and each that it looks at, in a layer without a window."""
    new = step.extend_lens[first_row:].astype(np.int64)
    return float(new @ (step.seq_lens[first_row:] - new / 2))


def padded(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds it."""
    place = bisect.bisect_left(buckets, size)
    return buckets[place] if place < len(buckets) else size
