"""A live server of two KV groups, one of them a window, that guesses tokens: they are the same, whatever weights come."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints import make_checkpoint
from live_server import LiveServer, running

# Gemma 3's window is 8 tokens here, two pages. Most prompts reach far beyond it, some share a beginning, all repeat themselves.
PROMPTS = [[3 + (i * 7 + i % 5 * seed) % 290 for i in range(5 + 9 * seed)] + [40 + seed, 9, 51] * 3 for seed in range(6)]
PROMPTS += [[*prompt, 77, 78] for prompt in PROMPTS[3:]]
NUM_TOKENS = 40
OPTIONS = {
    "--page-size": 4, "--chunked-prefill-size": 32, "--context-length": 160, "--max-total-tokens": 480,
    "--max-running-requests": 4, "--decode-row-buckets": 4, "--prefill-token-buckets": 64,
}  # fmt: skip
NGRAM = ("--speculative-algorithm", "NGRAM")


def tokens_now(server: LiveServer) -> list[list[int]]:
    """Of all prompts, which come at once: some run together, the others wait."""
    sampling = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}

    def ask(prompt: list[int]) -> list[int]:
        reply: dict[str, Any] = server.generate(input_ids=prompt, sampling_params=sampling)
        output_ids: list[int] = reply["output_ids"]
        return output_ids

    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(ask, PROMPTS))


def test_drafts_change_no_token_and_new_weights_are_those_of_a_fresh_server(
    checkpoint: Callable[[str], Path], tmp_path: Path, compilation_cache: str
) -> None:
    old, new = checkpoint("gemma3"), make_checkpoint("gemma3", tmp_path / "new", seed=1)
    common = [str(word) for option in OPTIONS.items() for word in option] + ["--compilation-cache-dir", compilation_cache]
    expected = {}
    for folder in (old, new):
        with running(tmp_path / "plain.log", "--model-path", str(folder), *common) as plain:
            expected[folder] = tokens_now(plain)
    assert expected[old] != expected[new]
    with running(tmp_path / "ngram.log", "--model-path", str(old), *common, *NGRAM) as server:
        for _ in range(2):  # the second time on what is cached
            assert tokens_now(server) == expected[old]
        state = server.internal_state()
        assert [group["window"] for group in state["kv_groups"]] == [None, 8]
        assert state["avg_spec_accept_length"] > 1.2 and state["cached_tokens"] > 0, state
        reply = server.post("/update_weights_from_disk", {"model_path": str(new)})
        assert reply.status_code == 200, reply.text
        for _ in range(2):
            assert tokens_now(server) == expected[new]
