"""jaxserve.Engine and the command line on real weights, safetensors and Orbax."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import load_model
from live_server import environment

from jaxserve import Engine
from jaxserve.server.requests import RequestError

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


def check_embeddings(engine: Engine, table: np.ndarray) -> None:
    """They give what the ids give that they belong to: as arrays and lists, together and streamed."""
    ids = [list(range(20, 60)), [7, 8, 9], [11]]
    expected = [(reply["output_ids"], reply["text"]) for reply in engine.generate(input_ids=ids, sampling_params=GREEDY)]

    def found(**fields: Any) -> list[Any]:
        replies = engine.generate(sampling_params={**GREEDY, **fields.pop("sampling", {})}, **fields)
        return [(reply["output_ids"], reply["text"]) for reply in (replies if isinstance(replies, list) else [replies])]

    assert found(input_embeds=[table[one] for one in ids]) == expected
    assert found(input_embeds=[table[one].tolist() for one in ids]) == expected
    assert found(input_embeds=table[ids[0]]) == expected[:1]
    assert found(input_embeds=table[ids[1]], sampling={"n": 2}) == expected[1:2] * 2
    whole = engine.generate(input_embeds=table[ids[0]], sampling_params=GREEDY)["meta_info"]
    assert (whole["prompt_tokens"], whole["cached_tokens"] > 0) == (40, True)
    *_, last = engine.generate(input_embeds=table[ids[0]], sampling_params=GREEDY, stream=True)
    assert (last["output_ids"], last["text"]) == expected[0]
    with pytest.raises(RequestError, match=f"the model's hidden size, got {table.shape[1] - 1}"):
        engine.generate(input_embeds=table[ids[0], 1:])


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
        check_embeddings(engine, load_model(checkpoint("qwen3")).get_input_embeddings().weight.detach().numpy())
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
