"""Tokens and logprobs of live servers against Transformers (tests/parity.py). Other models: scheduler/test_model_parity.py."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, running
from parity import CACHED_OUTPUT_LEN, LIVE, NUM_CLIENTS, NUM_TOP, Oracle, Served


def ask(server: LiveServer, prompt: list[int] | list[list[int]], output_len: int, *, ignore_eos: bool = True) -> Any:
    """The reply to a prompt, or a list of replies to a list of prompts."""
    return server.generate(
        input_ids=prompt,
        sampling_params={"temperature": 0, "max_new_tokens": output_len, "ignore_eos": ignore_eos},
        return_logprob=True,
        top_logprobs_num=NUM_TOP,
    )


def check(oracle: Oracle, prompt: list[int], output_len: int, reply: dict[str, Any]) -> None:
    answer, meta = reply["output_ids"], reply["meta_info"]
    logprobs, top = meta["output_token_logprobs"], meta["output_top_logprobs"]
    values = [[logprob for logprob, _, _ in best] for best in top]
    oracle.check(prompt, answer, [logprob for logprob, _, _ in logprobs], values, output_len)
    assert [token for _, token, _ in logprobs] == answer


def on_the_command_line(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        if value is not False:
            words.append(f"--{name.replace('_', '-')}")
        if not isinstance(value, bool):
            words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return words


@pytest.mark.parametrize("served", LIVE, ids=str)
def test_live_tokens_equal_those_of_transformers(
    served: Served, checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    model = checkpoint(served.case)
    oracle = Oracle(model)
    prompts = oracle.prompts()
    options = ["--model-path", str(model), "--compilation-cache-dir", compilation_cache]
    options += on_the_command_line(served.options(oracle.context_len))
    with running(tmp_path / "server.log", *options) as server, concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        for seen, output_len in ((False, oracle.output_len), (True, CACHED_OUTPUT_LEN)):
            replies = list(pool.map(ask, repeat(server), prompts, repeat(output_len)))
            for prompt, reply in zip(prompts, replies, strict=True):
                check(oracle, prompt, output_len, reply)
                oracle.check_hit(served, len(prompt), reply["meta_info"]["cached_tokens"], seen=seen)
        for prompt in prompts[:3]:
            check(oracle, prompt, CACHED_OUTPUT_LEN, ask(server, prompt, CACHED_OUTPUT_LEN))
