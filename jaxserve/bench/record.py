"""The record of a benchmark run: one line of JSON that `bench serving` and the other commands append to a file, and that
`bench compare` and `bench plot` read.

A record is flat, with the key names of SGLang's bench_serving where it has one (`mean_ttft_ms`, `request_throughput`,
`completed`, `duration`, ...), so that what reads SGLang's files reads ours. What SGLang does not have:

    jaxserve_bench  Header: which command this is of, its version and commit, when, how it was called
    failed          requests without a whole reply; `failures` says of which kind: {kind: {"count": 3, "message": "..."}}
    interrupted     Ctrl-C ended the run; the numbers are those of the requests that had ended
    timeline        what the server said of itself meanwhile, as lists of one length (TIMELINE)
    client          what the client could have borne: {"processes", "events_per_s", "ceiling_events_per_s", "max_lag_ms"}
    goodput         requests per second that kept all limits of --goodput; slo_attainment: their share

With details a record has lists with one entry per request (DETAILS), in the order in which requests were sent.
This module knows neither HTTP nor JAX.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Raised when a key changes its meaning.
RECORD_VERSION = 1

Record = dict[str, Any]

# Statistics of a latency, in this order; `mean_ttft_ms` is the mean of "ttft".
STATISTICS = ("mean", "median", "std", "p90", "p95", "p99")
# Latencies of a serving record, with how a table calls them. itl has max_itl_ms, too.
LATENCIES = {"e2e_latency": "E2E latency", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL"}

# Options that say what load a serving or offline record is of: two of the same load can be compared.
LOAD_FIELDS = (
    "backend", "dataset_name", "dataset_path", "num_prompts", "request_rate", "max_concurrency", "random_input_len",
    "random_output_len", "random_range_ratio", "sharegpt_output_len", "sharegpt_context_len", "num_turns", "gsp_num_groups",
    "gsp_prompts_per_group", "gsp_system_prompt_len", "gsp_question_len", "gsp_output_len", "gsp_range_ratio", "gsp_num_turns",
    "gsp_ordered", "tokenize_prompt", "seed", "temperature", "top_p", "disable_ignore_eos", "disable_stream",
    "extra_request_body", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
)  # fmt: skip

# Lists of a record's `timeline`: seconds since the first request, then what the server said (null: it did not say).
TIMELINE = ("time_s", "num_running_reqs", "num_waiting_reqs", "token_usage")

# Lists of a record with details: one entry per request sent. Seconds; `start_times` since the first request. `itls` is a list
# of lists: the gap before each token after the first. Of a failed request: latencies 0, no gaps, and its error, "" otherwise.
DETAILS = (
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "e2e_latencies",
    "start_times",
    "cached_tokens",
    "generated_texts",
    "errors",
)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number of a record that two runs can be compared by."""

    key: str
    label: str
    unit: str
    more_is_better: bool


def _latency_metrics(name: str, label: str) -> list[Metric]:
    return [
        Metric(f"{statistic}_{name}_ms", f"{label} {statistic}", "ms", False) for statistic in STATISTICS if statistic != "std"
    ]


# What a serving record can be compared by, the most telling first.
SERVING_METRICS: tuple[Metric, ...] = (
    Metric("request_throughput", "Requests", "req/s", True),
    Metric("input_throughput", "Input tokens", "tok/s", True),
    Metric("output_throughput", "Output tokens", "tok/s", True),
    Metric("total_throughput", "All tokens", "tok/s", True),
    Metric("goodput", "Goodput", "req/s", True),
    *(metric for name, label in LATENCIES.items() for metric in _latency_metrics(name, label)),
    Metric("max_itl_ms", "ITL max", "ms", False),
)


def header(kind: str, command: Sequence[str] | None = None) -> Record:
    """The beginning of a record of `jaxserve bench KIND`, which was called with `command` (default: this process's)."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    words = [Path(sys.argv[0]).name, *sys.argv[1:]] if command is None else list(command)
    version = importlib.metadata.version("jaxserve")
    about = {"version": RECORD_VERSION, "kind": kind, "package": version, "commit": _commit(), "time": now, "command": words}
    return {"jaxserve_bench": about}


def _commit() -> str | None:
    """Of the checkout that this code is run from, with a + behind it if files were changed; None: it is no checkout."""
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed package may stand inside another's checkout
        return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def latency_fields(name: str, values_s: Sequence[float] | np.ndarray) -> Record:
    """STATISTICS of a latency as fields of a record, in ms; null where there is no value."""
    values = np.asarray(values_s, np.float64) * 1e3
    if not len(values):
        return {f"{statistic}_{name}_ms": None for statistic in STATISTICS}
    p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99))
    numbers = (values.mean(), p50, values.std(), p90, p95, p99)
    return {f"{statistic}_{name}_ms": float(number) for statistic, number in zip(STATISTICS, numbers, strict=True)}


def append_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """As one line at the end of a file. Numbers that JSON does not have become strings ("inf") or null (not a number)."""
    line = json.dumps(_plain(record), allow_nan=False, separators=(",", ":"))
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def check_writable(path: str | Path) -> None:
    """Raises OSError now if `append_record` would later. Leaves no empty file behind."""
    path = Path(path)
    existed = path.exists()
    with path.open("a", encoding="utf-8"):
        pass
    if not existed:
        path.unlink()


def read_records(path: str | Path) -> Iterator[Record]:
    """The records of a file, SGLang's too. Raises ValueError, with a sentence, for a line that is none."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number}: not an object, but {type(record).__name__}.")
            yield record


def kind_of(record: Mapping[str, Any]) -> str:
    """Which `jaxserve bench` command wrote it; SGLang's bench_serving, which does not say, counts as "serving"."""
    about = record.get("jaxserve_bench")
    return str(about.get("kind", "serving")) if isinstance(about, dict) else "serving"


def number(record: Mapping[str, Any], key: str) -> float | None:
    """A number of a record ("inf" too), or None if it has none under that key."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
