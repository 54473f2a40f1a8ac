"""jaxserve.Engine and the command line on real weights, safetensors and Orbax."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from live_server import environment

from jaxserve import Engine

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def options(folder: Path, cache: str) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "max_running_requests": 4,
        "max_total_tokens": 4096,
        "chunked_prefill_size": 16,
        "decode_row_buckets": (4,),
        "compilation_cache_dir": cache,
        "log_level": "warning",
        "warmup": "full",
    }


def test_engine_generates_streams_and_awaits(checkpoint: Callable[[str], Path], compilation_cache: str) -> None:
    with Engine(**options(checkpoint("qwen3"), compilation_cache)) as engine:
        one = engine.generate("the quick", GREEDY)
        assert len(one["output_ids"]) == 12
        two = engine.generate(["the quick", "brown fox"], GREEDY)
        assert two[0]["output_ids"] == one["output_ids"]
        parts = list(engine.generate("the quick", GREEDY, stream=True))
        assert parts[-1]["text"] == one["text"]

        async def both() -> list[dict[str, Any]]:
            return await asyncio.gather(*(engine.async_generate("the quick", GREEDY) for _ in range(2)))

        assert [reply["output_ids"] for reply in asyncio.run(both())] == [one["output_ids"]] * 2
        state = engine.get_server_info()["internal_states"][0]
        assert state["num_used_tokens"] == 0
        assert state["runner"]["compiles_after_ready_total"] == 0


def test_a_converted_checkpoint_serves_the_same_tokens(
    checkpoint: Callable[[str], Path], compilation_cache: str, tmp_path: Path
) -> None:
    source, converted = checkpoint("qwen3"), tmp_path / "orbax"
    command = [sys.executable, "-m", "jaxserve", "convert", "--model-path", str(source), "--output", str(converted)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert not list(converted.glob("*.safetensors"))
    answers = []
    for folder, tp_size in ((source, 1), (converted, 2)):
        with Engine(**options(folder, compilation_cache), tp_size=tp_size) as engine:
            answers.append(engine.generate(input_ids=[5, 6, 7, 8], sampling_params=GREEDY)["output_ids"])
    assert answers[0] == answers[1]


def test_generate_from_the_command_line(checkpoint: Callable[[str], Path], compilation_cache: str) -> None:
    command = [sys.executable, "-m", "jaxserve", "generate", "--model-path", str(checkpoint("qwen3"))]
    command += ["--max-running-requests", "4", "--max-total-tokens", "4096", "--chunked-prefill-size", "16"]
    command += ["--decode-row-buckets", "4", "--compilation-cache-dir", compilation_cache]
    command += ["--temperature", "0", "--max-new-tokens", "5", "the quick"]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
