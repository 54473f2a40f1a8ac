"""A profile of a server that serves: it opens as what it says it is, and has the steps that were asked for."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path

import jax.profiler
from live_server import LiveServer

from jaxserve import RemoteEngine
from jaxserve.bench.trace import read_trace, summarize


def busy(server: LiveServer) -> threading.Thread:
    params = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    thread = threading.Thread(target=lambda: list(server.stream("/generate", {"text": "A trace", "sampling_params": params})))
    thread.start()
    return thread


def test_twenty_steps(demo_server: LiveServer, tmp_path: Path) -> None:
    thread = busy(demo_server)
    try:
        body = {"num_steps": 20, "output_dir": str(tmp_path), "profile_id": "twenty", "profile_stages": ["decode"]}
        reply = demo_server.post("/start_profile", body)
        assert (reply.status_code, reply.text) == (200, f"Profiling to {tmp_path}/twenty.\n")
    finally:
        thread.join()
    give_up_s = time.monotonic() + 60
    while demo_server.get("/server_info").json()["internal_states"][0]["profile"]:
        assert time.monotonic() < give_up_s
    trace = read_trace(str(tmp_path))
    assert json.loads(gzip.decompress(trace.path.read_bytes()))["traceEvents"]
    summary = summarize(trace)
    assert summary.steps_of == {"decode": 20} and summary.rows == 1
    assert {"wait", "process", "schedule", "receive"} <= {stage.name for stage in summary.host}
    assert 0 < summary.busy <= 1 and summary.ops and summary.gaps
    # All processes on one clock.
    merged = trace.path.parent / "perfetto_trace.json.gz"
    while not merged.exists():
        assert time.monotonic() < give_up_s
    content = json.loads(gzip.decompress(merged.read_bytes()))
    assert content.keys() == {"displayTimeUnit", "traceEvents"}
    launches = [event["ts"] for event in content["traceEvents"] if str(event.get("name", "")).startswith("launch ")]
    for name in ("detokenize", "texts to their readers"):
        times = [event["ts"] for event in content["traceEvents"] if event.get("name") == name]
        # A process that waits for a core may come to its outputs late, and to several at once.
        assert times and launches[0] < times[0] <= times[-1] < launches[-1] + 1e6, (name, launches, times)
    assert summarize(read_trace(str(merged))).steps_of == {"decode": 20}
    # XProf's format: the same launches, with their facts, and a line per thread.
    (xplane,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(xplane)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    launches = [dict(event.stats) for event in events if event.name == "launch decode"]
    assert len(launches) == 20 and launches[0]["rows"] == 1 and "step_num" in launches[0]


def test_until_stopped_by_a_remote_engine(demo_server: LiveServer, tmp_path: Path) -> None:
    engine = RemoteEngine(demo_server.url)
    assert "Profiling to" in str(engine.start_profile(output_dir=str(tmp_path), with_stack=True))
    again = demo_server.post("/start_profile", {"num_steps": 20, "output_dir": str(tmp_path)})
    assert again.status_code == 400 and "A profile is being taken already" in again.text
    demo_server.generate(text="x", sampling_params={"max_new_tokens": 3, "temperature": 0, "ignore_eos": True})
    assert str(tmp_path) in str(engine.stop_profile())
    trace = read_trace(str(tmp_path))
    assert sum(summarize(trace).steps_of.values()) == 3
    assert any("loop.py" in event.name for event in trace.host), "calls of Python functions"
    stopped = demo_server.post("/stop_profile", {})
    assert stopped.status_code == 400 and "No profile is being taken." in stopped.text
