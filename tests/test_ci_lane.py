"""The budget that a lane of CI is held to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LANE = Path(__file__).parents[1] / ".ci" / "lane.py"
BUSY = "import time\nwhile time.process_time() < 0.5: pass"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(LANE), *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("budget", "code", "expected"), [("1", BUSY, 0), ("0.0001", BUSY, 3), ("1", "exit(7)", 7)])
def test_a_lane_has_the_status_of_its_command_and_of_its_budget(budget: str, code: str, expected: int) -> None:
    done = run("small", budget, "--", sys.executable, "-c", code)
    assert done.returncode == expected, done
    assert "lane small:" in done.stdout and f"of {budget} min" in done.stdout
    assert ("over its budget" in done.stderr) == (expected == 3)


def test_what_is_missing_is_said() -> None:
    assert run("small").returncode == 2
