"""Nsight Compute on four cases: how busy DRAM, issue slots, shared memory and tensor cores are, what warps wait for, and how
unequally the multiprocessors end.

The clocks stay as they are (`--clock-control none`), so shares are of what the device really ran at.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterable

from benchmarks.device.case import Case, Measure, NotHereError, Numbers, Setting
from benchmarks.device.subprocesses import probe, run, tool

# Section, case, part of the kernel's name.
PROFILED = (
    ("decode", "decode 64 x 4096", "paged_decode_mosaic"),
    ("decode", "decode 64 x 4096, fp8 KV", "paged_decode_mosaic"),
    ("extend", "extend 16384", "paged_extend_mosaic"),
    ("mla", "mla decode 64 x 4096, 128 heads", "mla_decode_mosaic"),
)
METRICS = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "shared": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "l2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "sm_clock": "sm__cycles_elapsed.avg.per_second",
    "duration": "gpu__time_duration.sum",
}
# Cycles that a multiprocessor had work, of all of them; and of the kernel. Unequal ends are the tail of a static division.
BUSY = {"least": "sm__cycles_active.min", "mean": "sm__cycles_active.avg", "most": "sm__cycles_active.max"}
_ELAPSED = "sm__cycles_elapsed.max"
_STALLS = "smsp__average_warps_issue_stalled_"
_STALLS_END = "_per_issue_active.ratio"
# A kernel inside a CUDA graph is not a launch of its own; and ncu saves what a kernel may write, to run it once more.
_ENVIRONMENT = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
_LIMIT_S = 150.0  # JAX starts and compiles in it


def command(path: str, kernel: str) -> list[str]:
    metrics = ",".join((*METRICS.values(), *BUSY.values(), _ELAPSED))
    options = ["--clock-control", "none", "--csv", "--page", "raw", "--section", "WarpStateStats", "--metrics", metrics]
    return [path, *options, "--kernel-name", f"regex:{kernel}", "--launch-skip", "3", "--launch-count", "1", "--kill", "yes"]


def parse(lines: Iterable[str]) -> Numbers:
    """Of ncu's CSV: a line of names, one of units, one per kernel."""
    rows = list(csv.reader(line for line in lines if line.startswith('"')))
    if len(rows) < 3:
        raise RuntimeError("ncu printed no table")
    values, units = dict(zip(rows[0], rows[2], strict=False)), dict(zip(rows[0], rows[1], strict=False))
    found: Numbers = {"kernel": values.get("Kernel Name", "")}
    for name, metric in METRICS.items():
        if metric in values:
            found[f"{name} ({units[metric]})"] = _number(values[metric])
    elapsed = _number(values.get(_ELAPSED, ""))
    if elapsed:
        found["busy"] = {name: round(_number(values.get(metric, "")) / elapsed, 4) for name, metric in BUSY.items()}
    stalls = {name[len(_STALLS) : -len(_STALLS_END)]: _number(values[name]) for name in values if _is_stall(name)}
    worst = sorted(stalls.items(), key=lambda item: -item[1])[:6]
    return {**found, "stalled warps per issue": {name: round(value, 2) for name, value in worst}}


def _is_stall(name: str) -> bool:
    return name.startswith(_STALLS) and name.endswith(_STALLS_END)


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def profile(section: str, case: str, kernel: str, setting: Setting) -> Measure:
    path = tool("ncu", setting)

    def measure() -> Numbers:
        status, output = run([*command(path, kernel), *probe(section, case)], _LIMIT_S, _ENVIRONMENT)
        if "==ERROR==" in output:
            raise NotHereError(next(line for line in output.splitlines() if "==ERROR==" in line)[:300])
        try:
            return parse(output.splitlines())
        except RuntimeError as error:
            raise RuntimeError(f"{error} (exit status {status})") from error

    return measure


def cases(setting: Setting) -> list[Case]:
    return [
        Case(f"ncu of {case}", functools.partial(profile, section, case, kernel, setting), limit_s=_LIMIT_S + 5)
        for section, case, kernel in PROFILED
    ]
