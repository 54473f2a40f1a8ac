"""The example with tunix' GRPO learner, where tunix is installed."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("tunix")

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "grpo_tunix.py"


@pytest.mark.parametrize("options", [(), ("--same-devices",)], ids=["half-each", "same-devices"])
def test_it_learns(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(EXAMPLE), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    first, last = map(float, re.findall(r"0\.\d+|1\.0+", ended.stdout.splitlines()[-1]))
    assert first < 0.5 < 0.8 < last, ended.stdout
