"""Runs one lane of CI and holds it to its budget of processor time, so that CI stays short as features are added.

    python3 .ci/lane.py test 20 -- make test

The budget is minutes of user time, of the lane and all its children, on a machine as fast as the reference; how fast this one
is, a fixed piece of Python says before and after. Wall time is printed, but no verdict hangs on it: it depends on who else
uses the machine.
Exits with the command's status, or with 3 if it succeeded over budget.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

REFERENCE_S = 0.120  # of `piece_of_work` on an idle core of the machine that the budgets were set on (AMD EPYC, 2026-11)
OVER_BUDGET = 3


def piece_of_work() -> float:
    """Seconds of processor time for a fixed computation: the least of a few, since others may use the core."""
    return min(_once() for _ in range(7))


def _once() -> float:
    started_s = time.process_time()
    total = 0
    table: dict[int, int] = {}
    for i in range(1_000_000):
        total += i * i % 7
        table[i & 1023] = total
    return time.process_time() - started_s


def used_s() -> float:
    """User time of all children that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def report(name: str, budget_minutes: float, wall_s: float, cpu_s: float, slowness: float) -> tuple[str, bool]:
    """The line to print, and whether the lane kept its budget. `slowness`: of this machine; 2 takes twice as long."""
    minutes = cpu_s / 60 / slowness
    line = (
        f"lane {name}: {wall_s / 60:.1f} min of wall time, {cpu_s / 60:.1f} of processor time, "
        f"the machine {slowness:.2f} times as slow as the reference: {minutes:.1f} of {budget_minutes:g} min"
    )
    return line, minutes <= budget_minutes


def main() -> int:
    if len(sys.argv) < 5 or sys.argv[3] != "--":
        print("usage: lane.py NAME MINUTES -- COMMAND ...", file=sys.stderr)
        return 2
    name, budget_minutes, command = sys.argv[1], float(sys.argv[2]), sys.argv[4:]
    before_s, started_s = piece_of_work(), time.monotonic()
    status = subprocess.run(command, check=False).returncode
    wall_s = time.monotonic() - started_s
    line, is_kept = report(name, budget_minutes, wall_s, used_s(), max(before_s, piece_of_work()) / REFERENCE_S)
    print(line, flush=True)
    if status == 0 and not is_kept:
        print(f"The lane {name} is over its budget: make it cheaper (tiny models, shared fixtures, a covering set, a target of "
              "its own for the full matrix), or raise the budget in .ci/run and say why.", file=sys.stderr)  # fmt: skip
        return OVER_BUDGET
    return status


if __name__ == "__main__":
    sys.exit(main())
