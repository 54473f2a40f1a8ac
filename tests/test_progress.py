"""Progress: bars on terminals, lines elsewhere, through worker processes too."""

from __future__ import annotations

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from jaxserve import progress
from jaxserve.progress import for_workers, progress_bar, terminal_columns

# A process whose worker draws a bar, logs and says it is ready, as the scheduler does.
MAIN = """
import asyncio, sys
from jaxserve.config import ServerArgs
from jaxserve.server.logs import configure_logging
from jaxserve.server.process_worker import WorkerCommand
from jaxserve.server.workers import WorkerGroup, between_processes
async def main():
    with between_processes(ServerArgs(model_path="m")) as channels:
        group = WorkerGroup([WorkerCommand("w", (sys.executable, sys.argv[1]))])
        group.start(channels)
        await group.watch()
        await group.kill()
configure_logging("info")
asyncio.run(main())
"""
WORKER = """
import logging, sys
from jaxserve import progress
from jaxserve.server.worker_process import run_worker
from tqdm import tqdm
progress._LINE_EVERY_S = 0.0
def work(context):
    with progress.progress_bar(4, "Compiling", "program") as bar:
        for _ in range(4):
            bar.update()
    list(tqdm(range(3), desc="foreign"))
    logging.getLogger().info("a line")
sys.exit(run_worker("w", work))
"""


def command(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    main, worker = tmp_path / "main.py", tmp_path / "worker.py"
    main.write_text(MAIN)
    worker.write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": str(Path(jaxserve.__file__).parents[1]), "TERM": "xterm"}
    return [sys.executable, str(main), str(worker)], environment


def read_all(terminal: int) -> str:
    output = b""
    try:
        while data := os.read(terminal, 1 << 16):
            output += data
    except OSError:  # how a terminal says that nobody writes any more
        pass
    return output.decode()


def test_a_workers_bars_reach_a_terminal_and_nothing_is_written_into_them(tmp_path: Path) -> None:
    argv, environment = command(tmp_path)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(argv, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = read_all(ours)
    os.close(ours)
    assert process.wait(60) == 0, output
    assert re.search(r"Compiling: +\d+%\|.*\| \d/4 programs", output), output
    assert "foreign" in output
    assert "\r\x1b[K[" in output, "a log line clears the bar that may stand there"


def test_a_workers_bars_are_log_lines_in_a_file(tmp_path: Path) -> None:
    argv, environment = command(tmp_path)
    with (tmp_path / "log").open("wb") as log:
        subprocess.run(argv, env=environment, stdout=log, stderr=log, timeout=60, check=True)
    written = (tmp_path / "log").read_bytes()
    assert b"\r" not in written and b"\x1b" not in written, written
    assert re.search(rb"\[.* w\] INFO Compiling: 50 % after \d s\n", written), written
    assert b"foreign" not in written


def test_lines_come_every_few_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s)
    caplog.set_level(logging.INFO)
    with progress_bar(100, "Loading weights", "B") as bar:
        for _ in range(100):
            now_s += 0.25
            bar.update()
    assert [record.message for record in caplog.records] == [
        f"Loading weights: {percent} % after {percent / 4:.0f} s" for percent in (20, 40, 60, 80, 100)
    ]
    caplog.clear()
    with progress_bar(100, "Loading weights", "B", show=False) as bar:
        now_s += 100.0
        bar.update(50)
    assert caplog.records == []


@pytest.mark.parametrize(("told", "columns"), [("0", None), ("120", 120), ("many", None), ("", None)])
def test_workers_are_told_where_their_output_ends(
    told: str, columns: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAXSERVE_TERMINAL_COLUMNS", told)
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("sys.stderr", log)
        assert terminal_columns() == columns
        environment = for_workers()
    assert environment["JAXSERVE_TERMINAL_COLUMNS"] == str(columns or 0)
    assert ("TQDM_DISABLE" in environment) == (columns is None)
