"""compute-sanitizer on the canary's cases: bad addresses, races in shared memory, misused barriers, memory nobody wrote."""

from __future__ import annotations

import functools
import re

from benchmarks.device.case import Case, Measure, Numbers, Setting
from benchmarks.device.subprocesses import probe, run, tool

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
KERNELS = ("decode", "extend", "write", "mla decode")
_EXIT_CODE = 99
_LIMIT_S = 150.0  # JAX starts and compiles in it, and every access is looked at
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards?")


def summary(output: str) -> int | None:
    """Errors or hazards, by the tool's last line."""
    found = _SUMMARY.findall(output)
    return sum(int(number or 0) for number in found[-1]) if found else None


def sanitize(which: str, kernel: str, setting: Setting) -> Measure:
    path = tool("compute-sanitizer", setting)

    def measure() -> Numbers:
        command = [path, "--tool", which, "--error-exitcode", str(_EXIT_CODE), *probe("canary", f"{kernel}, graphs off")]
        status, output = run(command, _LIMIT_S)
        errors = summary(output)
        if status == 0 and errors == 0:
            return {"errors": 0}
        lines = [line for line in output.splitlines() if line.startswith("=========")]
        return {"status": "failed", "errors": errors, "reason": f"exit status {status}; {' '.join(lines[:8])[:600]}"}

    return measure


def cases(setting: Setting) -> list[Case]:
    return [
        Case(f"{which} of {kernel}", functools.partial(sanitize, which, kernel, setting), limit_s=_LIMIT_S + 5)
        for which in TOOLS
        for kernel in KERNELS
    ]
