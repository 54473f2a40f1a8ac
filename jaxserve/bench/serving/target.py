"""The server beside the requests: what it is, its cache, its profiler, and what it says of itself while the run goes on."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp

from jaxserve.bench.record import TIMELINE, Record

_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 60.0
_SAMPLE_EVERY_S = 0.5
# What /metrics calls the numbers of a time line: SGLang and ours, then vLLM. The first that is there counts.
_METRICS = {
    "num_running_reqs": ("num_running_reqs", "num_requests_running"),
    "num_waiting_reqs": ("num_queue_reqs", "num_waiting_reqs", "num_requests_waiting"),
    "token_usage": ("token_usage", "kv_cache_usage_perc", "gpu_cache_usage_perc"),
}


class Target:
    def __init__(self, base: str, headers: dict[str, str]) -> None:
        self.base, self._headers = base, headers

    def get(self, path: str) -> Any:
        """The JSON there, or None if the server has no such thing."""
        request = urllib.request.Request(self.base + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
                return json.load(reply)
        except (OSError, ValueError):
            return None

    def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = _TIMEOUT_S) -> str | None:
        """None if that went well, otherwise why not."""
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(self.base + path, json.dumps(body or {}).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s):
                return None
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read().decode(errors='replace')[:300].strip() or error.reason}"
        except OSError as error:
            return str(error)

    def model_names(self) -> list[str]:
        models = self.get("/v1/models")
        data = models.get("data") if isinstance(models, dict) else None
        return [str(one["id"]) for one in data or () if isinstance(one, dict) and "id" in one]

    def server_info(self) -> Record | None:
        info = self.get("/server_info")
        return info if isinstance(info, dict) else None

    def tokenizer_name(self) -> str | None:
        """The server's tokenizer if it is a folder of this machine."""
        info = self.get("/model_info")
        for name in ("tokenizer_path", "model_path"):
            path = info.get(name) if isinstance(info, dict) else None
            if isinstance(path, str) and (path == "demo" or Path(path).is_dir()):
                return path
        return None

    def flush_cache(self) -> str | None:
        """SGLang's way, or vLLM's. None if that went well, otherwise why not."""
        reason = self.post(f"/flush_cache?timeout={_FLUSH_TIMEOUT_S:g}", timeout_s=_FLUSH_TIMEOUT_S + _TIMEOUT_S)
        if reason and reason.startswith("404"):
            reason = self.post("/reset_prefix_cache", timeout_s=_FLUSH_TIMEOUT_S) and reason
        return reason


class Timeline:
    """Samples how busy the server is until it is stopped; of several replicas the sums, and the mean KV use."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._rows: list[tuple[float, ...]] = []  # monotonic time, then the numbers of TIMELINE

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._target._headers, timeout=timeout) as session:
            read = _read_loads
            while True:
                now_s = time.monotonic()
                try:
                    numbers = await read(session, self._target.base)
                    if numbers is None and read is _read_loads:
                        read = _read_metrics
                        numbers = await read(session, self._target.base)
                except (aiohttp.ClientError, OSError, ValueError, TypeError, LookupError):
                    numbers = {}
                if numbers is None:
                    return
                if numbers:
                    self._rows.append((now_s, *(numbers.get(name) for name in TIMELINE[1:])))  # type: ignore[arg-type]
                await asyncio.sleep(_SAMPLE_EVERY_S)

    def field(self, start_s: float) -> dict[str, list[Any]] | None:
        """As it stands in a record, from the start of the run on; None if the server tells nothing."""
        rows = [(round(now_s - start_s, 3), *numbers) for now_s, *numbers in self._rows if now_s >= start_s]
        if not rows:
            return None
        return {name: list(column) for name, column in zip(TIMELINE, zip(*rows, strict=True), strict=True)}


async def _read_loads(session: aiohttp.ClientSession, base: str) -> dict[str, float] | None:
    async with session.get(f"{base}/v1/loads") as reply:
        if reply.status != 200:
            return None
        loads = (await reply.json())["loads"]
    sums = {name: sum(load.get(name) or 0 for load in loads) for name in TIMELINE[1:]}
    return {**sums, "token_usage": sums["token_usage"] / max(1, len(loads))}


async def _read_metrics(session: aiohttp.ClientSession, base: str) -> dict[str, float] | None:
    async with session.get(f"{base}/metrics") as reply:
        return gauges(await reply.text()) if reply.status == 200 else None


def gauges(text: str) -> dict[str, float]:
    """The numbers of a time line in a Prometheus page."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, value = line.rpartition(" ")
        found.setdefault(name.partition("{")[0].rpartition(":")[2], []).append(float(value))
    numbers = {}
    for name, theirs in _METRICS.items():
        values = next((found[one] for one in theirs if one in found), None)
        if values is not None:
            numbers[name] = sum(values) / (len(values) if name == "token_usage" else 1)
    return numbers
