"""How many events per second our own client can take: what it costs one process to read a stream, measured at a stub server.

The stub sends at a moderate pace and the process's CPU time per event is taken, so that a busy machine changes little: the
ceiling is that of a process that has a core for itself. It is measured once for each API on a machine, and
kept in the cache folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from pathlib import Path

import aiohttp
import msgspec

from jaxserve.bench.serving.clients import run_clients
from jaxserve.bench.serving.work import Load, Task

# Events per second of the stub: few enough that one process keeps up, many enough that they are what costs.
_STREAMS, _EVENTS, _STEP_S = 48, 120, 0.01


def ceiling_per_process(load: Load, *, anew: bool = False) -> float:
    """Events per second; from the cache if it is there."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxserve" / "bench-client.json"
    key = f"{load.api} {platform.node()} {os.cpu_count()} Python {platform.python_version()} aiohttp {aiohttp.__version__}"
    known = _read(path)
    if anew or key not in known:
        known[key] = asyncio.run(_measure(load))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known))
        except OSError:
            pass  # then it is measured again
    return known[key]


def _read(path: Path) -> dict[str, float]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in known.items() if isinstance(value, float) and value > 0}


async def _measure(load: Load) -> float:
    stub = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jaxserve.bench.serving.stub", load.api, str(_EVENTS), str(_STEP_S),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert stub.stdin is not None and stub.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(await stub.stdout.readline())}/"
        changes = {
            "headers": {},
            "extra_body": {},
            "incremental": False,
            "num_processes": 1,
            "max_concurrency": None,
            "stream": True,
        }
        plain = msgspec.structs.replace(load, url=url, **changes)
        tasks = [Task(turns=["Hello"], prompt_len=1, output_len=_EVENTS) for _ in range(_STREAMS)]
        run = await run_clients(plain, tasks, asyncio.Event(), lambda: None)
    finally:
        stub.stdin.close()
        await stub.wait()
    failed = [one for one in run.outcomes if not one.ok]
    assert not failed, f"the stub failed: {failed[0].error_kind} {failed[0].error}"
    return run.reports[0].num_events / run.reports[0].cpu_s
