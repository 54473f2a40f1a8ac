"""What we expect of an H200, written down before the first run, and what we aim at. From SASS and HLO, never from a clock.

Assumed: 132 multiprocessors at 1.755 to 1.98 GHz, 4.4 to 4.5 TB/s of reads, bf16 products at the measured ceiling. What a row
is compared with is a number of one case's result as `rates` enters it, or of two cases'.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Prediction:
    case: str
    metric: str
    low: float | None  # None: only a ceiling is known
    high: float
    aim: float | None
    why: str
    over: str = ""  # another case: the metric is this other's time over the case's


_READ, _FLOP = "share_of_bandwidth", "tflop_per_s"
_FIXED = "fixed cost: 3 us of dependent loads, 3-6 us of tail, 4-6 us of combine"

PREDICTIONS = (
    Prediction("decode 64 x 4096", _READ, 0.89, 0.95, 0.92, f"100 KB in flight per SM against 34 needed; {_FIXED}"),
    Prediction("decode 64 x 4096", "us", 250, 270, None, "the same, as a time"),
    Prediction("decode 16 x 4096", _READ, 0.78, 0.82, 0.85, _FIXED),
    Prediction("decode 4 x 4096", _READ, 0.50, 0.55, 0.60, _FIXED),
    Prediction("decode 1 x 4096", "us", 10, 16, None, "attention and combine 5-8 us each, when one warpgroup combined"),
    Prediction(
        "decode 64 x 4096, fp8 KV", "times as fast", 1.25, 1.45, 1.6, "858 instructions a tile then, 629 now",
        over="decode 64 x 4096",
    ),
    Prediction("extend 16384", _FLOP, 610, 640, 660, "both wgmma drained in a step then: 84 cycles of slack, 595 now"),
    Prediction("extend 4096", _FLOP, 540, 580, 660, "the same, and 2.4 steps lost per CTA, before the grid was persistent"),
    Prediction("mla decode 64 x 4096, 128 heads", "share_of_floor", None, 0.77, None, "QK of the next tile starts after PV"),
    Prediction("Llama-8B decode 1 x 2048", "us", 3400, 4400, None, "weights 3.4 ms; ~400 launches without graphs 1 ms"),
)  # fmt: skip
