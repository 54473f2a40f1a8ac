"""A fake-backed HTTP server in a process of its own, on uvloop as in reality: run as a script, it prints its port and serves
until its input ends. Arguments: the limit on open files, and ServerArgs as one JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import uvloop
from fake_service import FakeService
from http_harness import live_server


@contextlib.contextmanager
def http_process(num_files: int, **options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, the server's URL); its log is the process's stderr, to be read after it has ended."""
    command = [sys.executable, __file__, str(num_files), json.dumps(options)]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def _serve(options: dict[str, Any]) -> None:
    async with live_server(FakeService(), **options) as url:
        print(url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
    uvloop.run(_serve(json.loads(sys.argv[2])))
