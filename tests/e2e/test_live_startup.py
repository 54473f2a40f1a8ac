"""A server that is ready before all is compiled, and the next one, which finds it all in the cache."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_server import LiveServer, environment, launch, running, wait_ready

from jaxserve.demo import demo_model_path

TIMEOUT_S = 180.0
PROMPTS = [list(range(5, 5 + length)) for length in (3, 20)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.8, "sampling_seed": 11},
    {"temperature": 0.9, "frequency_penalty": 0.4, "sampling_seed": 12},
    {"temperature": 0, "regex": "[a-e]{12}"},
]


def answers(server: LiveServer) -> list[list[int]]:
    limits = {"max_new_tokens": 12, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": {**asked, **limits}} for prompt in PROMPTS for asked in SAMPLINGS]
    return [server.generate(**body)["output_ids"] for body in bodies]


def test_early_answers_are_those_of_a_warm_server(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """On two devices, from an empty cache."""
    options = ["--model-path", str(checkpoint("qwen3")), "--compilation-cache-dir", str(tmp_path / "cache"), "--tp-size", "2"]
    options += ["--max-running-requests", "4", "--max-total-tokens", "4096", "--prefill-token-buckets", "16,32"]
    options += ["--chunked-prefill-size", "32", "--decode-row-buckets", "1,4"]
    with running(tmp_path / "early.log", *options, "--warmup", "early") as server:
        assert "still being compiled" in server.get("/ready").text
        early = answers(server)
        runner = server.internal_state()["runner"]
        assert runner["steps_in_larger_program_total"] > 0
        deadline_s = time.monotonic() + TIMEOUT_S
        while not runner["fully_warm"]:
            assert time.monotonic() < deadline_s, runner
            assert answers(server) == early
            runner = server.internal_state()["runner"]
        assert answers(server) == early
        assert server.get("/ready").text == "ready\n"
        after = server.internal_state()["runner"]
        assert after["compiles_total"] == runner["compiles_total"]
        assert after["steps_in_larger_program_total"] == runner["steps_in_larger_program_total"]
    with running(tmp_path / "warm.log", *options) as server:
        assert server.internal_state()["runner"]["compiles_total"] == 0
        assert answers(server) == early


def test_a_server_without_a_folder_for_programs_serves(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Its private folder has them meanwhile: the process that compiles in the background hands them over there."""
    (tmp_path / "file").touch()
    options = ["--model-path", str(checkpoint("qwen3")), "--compilation-cache-dir", str(tmp_path / "file" / "programs")]
    options += ["--max-running-requests", "1", "--max-total-tokens", "1024", "--prefill-token-buckets", "16,32"]
    options += ["--chunked-prefill-size", "32", "--decode-row-buckets", "1", "--warmup", "early"]
    with tempfile.TemporaryDirectory() as temporary:
        with running(tmp_path / "log", *options, env=environment() | {"TMPDIR": temporary}) as server:
            assert "--compilation-cache-dir names another folder" in server.log.read_text()
            assert (
                len(server.generate(text="the", sampling_params={"max_new_tokens": 4, "ignore_eos": True})["output_ids"]) == 4
            )
            deadline_s = time.monotonic() + TIMEOUT_S
            while not server.internal_state()["runner"]["fully_warm"]:
                assert time.monotonic() < deadline_s, server.log.read_text()
                time.sleep(0.1)
            assert list(Path(temporary).glob("jaxserve-*/compiled/executables/*.program"))
            assert "compiling it here" not in server.log.read_text()
        assert not list(Path(temporary).iterdir())


def test_a_server_stopped_at_its_start_ends_cleanly(compilation_cache: str, tmp_path: Path) -> None:
    """While programs are still loaded behind it: a thread that is in XLA must not abort the process. Twice, as it is a race."""
    options = ["--model-path", demo_model_path(), "--compilation-cache-dir", compilation_cache, "--warmup", "early"]
    for attempt in range(2):
        server = launch(tmp_path / f"{attempt}.log", *options, env=environment())
        try:
            wait_ready(server)
            assert server.stop() == 0, server.log.read_text()
        finally:
            server.process.kill()
