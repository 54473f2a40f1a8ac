"""--enable-deterministic-inference: a token has the same logprobs, to the last bit, whatever its batch, chunks and cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from peft_adapters import make_adapter

from jaxserve import Engine

NUM_PROMPTS, NEW_TOKENS = 32, 32
PROMPTS = [[5 + (seed * 31 + i * (7 + seed)) % 280 for i in range(3 + 2 * seed)] for seed in range(NUM_PROMPTS)]
# Nobody can know when they end, so that more run than the cache holds.
DRAWN = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
Drawn = tuple[list[list[int]], np.ndarray]  # of each prompt the tokens, and float32 [prompts, new tokens] their logprobs

# Attention of our own in C++; in XLA; of bfloat16 over int8; sums over devices; windows and caps; experts; latents.
SETUPS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-reference": {"attention_backend": "reference"},
    "qwen3-bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "qwen3-tp2": {"tp_size": 2, "dtype": "bfloat16"},
    "gemma2": {},
    "qwen3-moe": {"tp_size": 2},
    "deepseek-v3": {},
}


@pytest.fixture(scope="module")
def start(checkpoint: Callable[[str], Path], compilation_cache: str) -> Callable[..., Engine]:
    def make(setup: str, **options: Any) -> Engine:
        case = next(case for case in ("qwen3-moe", "qwen3", "gemma2", "deepseek-v3") if setup.startswith(case))
        defaults = {
            "in_process": True,
            "enable_deterministic_inference": True,
            "max_total_tokens": 4096,
            "compilation_cache_dir": compilation_cache,
            "skip_tokenizer_init": True,
            **SETUPS[setup],
            **options,
        }
        return Engine(str(checkpoint(case)), devices=jax.devices()[: defaults.get("tp_size", 1)], **defaults)

    return make


def draw(engine: Engine, batch_size: int, count: int = NUM_PROMPTS, **options: Any) -> Drawn:
    """The prompts' replies, so many of them at a time."""
    replies: list[Any] = []
    for first in range(0, count, batch_size):
        prompts = PROMPTS[first : min(first + batch_size, count)]
        replies += engine.generate(input_ids=prompts, sampling_params=DRAWN, return_logprob=True, **options)
    logprobs = [[entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in replies]
    return [reply["output_ids"] for reply in replies], np.array(logprobs, np.float32)


def score(engine: Engine, tokens: list[list[int]]) -> np.ndarray:
    """float32 [prompts, new tokens]: the logprobs of drawn tokens as those of a prompt."""
    texts = [prompt + drawn for prompt, drawn in zip(PROMPTS, tokens, strict=False)]
    replies: Any = engine.generate(
        input_ids=texts, sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0
    )
    kept = [reply["meta_info"]["input_token_logprobs"][-NEW_TOKENS:] for reply in replies]
    return np.array([[entry[0] for entry in entries] for entries in kept], np.float32)


def assert_same(found: Drawn, expected: Drawn) -> None:
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Iterator[Engine]:
    with start("qwen3") as running:
        yield running


@pytest.fixture(scope="module")
def together(engine: Engine) -> Drawn:
    """1,024 tokens, of all prompts at once, with nothing cached."""
    return draw(engine, NUM_PROMPTS)


@pytest.mark.parametrize("batch_size", [1, 7, NUM_PROMPTS])
def test_batch_and_cache_change_nothing(engine: Engine, together: Drawn, batch_size: int) -> None:
    if batch_size == 7:
        engine.flush_cache()
    assert_same(draw(engine, batch_size), together)


def test_given_tokens_score_as_they_did_when_they_were_drawn(engine: Engine, together: Drawn) -> None:
    np.testing.assert_array_equal(score(engine, together[0]), together[1])


@pytest.mark.parametrize(
    "options",
    [
        {"chunked_prefill_size": 16, "page_size": 4, "max_running_requests": 5, "attention_backend": "native"},
        {"chunked_prefill_size": 32, "page_size": 32, "enable_mixed_chunk": True},
        {"page_size": 1, "max_total_tokens": 700, "schedule_conservativeness": 0},  # requests are retracted
        {"disable_radix_cache": True, "disable_overlap_schedule": True},
    ],
    ids=["chunks of 16, pages of 4", "mixed", "retracted", "uncached"],
)
def test_options_change_nothing(start: Callable[..., Engine], together: Drawn, options: dict[str, Any]) -> None:
    with start("qwen3", **options) as engine:
        assert_same(draw(engine, NUM_PROMPTS), together)
        is_short = "max_total_tokens" in options
        assert (engine.get_server_info()["internal_states"][0]["num_retractions"] > 0) == is_short


@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "qwen3"])
def test_kinds_of_models(start: Callable[..., Engine], setup: str) -> None:
    with start(setup) as engine:
        expected = draw(engine, 8, count=8)
        np.testing.assert_array_equal(score(engine, expected[0]), expected[1])
        engine.flush_cache()
        assert_same(draw(engine, 3, count=8), expected)
    if SETUPS[setup].get("attention_backend") == "reference" or setup == "deepseek-v3":  # whose keys come by pages
        with start(setup, page_size=8, chunked_prefill_size=16) as engine:
            assert_same(draw(engine, 8, count=8), expected)


def test_adapters(start: Callable[..., Engine], checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Whether somebody else uses one changes nothing, and what uses one is as it is alone."""
    make_adapter(checkpoint("qwen3"), tmp_path, seed=1, r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    with start("qwen3", lora_paths=(f"it={tmp_path}",), max_lora_rank=8) as engine:
        plain, adapted = draw(engine, 8, count=8), draw(engine, 8, count=8, lora_path="it")
        assert plain[0] != adapted[0]
        both: Any = engine.generate(
            input_ids=PROMPTS[:8] * 2,
            sampling_params=DRAWN,
            return_logprob=True,
            lora_path=[None] * 8 + ["it"] * 8,
        )
        found = [[entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in both]
        assert [reply["output_ids"] for reply in both] == plain[0] + adapted[0]
        np.testing.assert_array_equal(np.array(found, np.float32), np.concatenate([plain[1], adapted[1]]))


def test_requests_without_a_seed_have_one(engine: Engine) -> None:
    def drawn(**params: Any) -> list[list[int]]:
        replies: Any = engine.generate(input_ids=PROMPTS[:1], sampling_params={**DRAWN, **params})
        return [reply["output_ids"] for reply in replies]

    samples = drawn(n=3)
    assert samples[0] == drawn()[0] == drawn(sampling_seed=42)[0]
    assert samples[1] == drawn(sampling_seed=43)[0] != samples[0]


def test_without_the_option_sums_follow_the_batch(start: Callable[..., Engine]) -> None:
    """Else nothing here would show anything."""
    few = {"max_running_requests": 16, "decode_row_buckets": (16,), "prefill_token_buckets": (64,), "chunked_prefill_size": 64}
    with start("qwen3", enable_deterministic_inference=False, random_seed=0, **few) as engine:
        tokens, together = draw(engine, 16, count=16)
        assert (score(engine, tokens) != together).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--enable-deterministic-inference must be off with --speculative-algorithm"),
        ({"chunked_prefill_size": 128}, r"--chunked-prefill-size must be in \[1, 64\] with --enable-deterministic-inference"),
        ({"chunked_prefill_size": -1}, r"--chunked-prefill-size must be in \[1, 64\] .*; got -1"),
        ({"max_running_requests": 65}, r"--max-running-requests must be in \[1, 64\]"),
        ({"page_size": 128}, r"--page-size must be in \[1, 64\]"),
        ({"enable_mixed_chunk": True, "max_running_requests": 60}, r"--max-running-requests must be in \[1, 48\] .*mixed"),
        ({"prefill_token_buckets": (16, 64)}, "--prefill-token-buckets must be 64 or unset"),
    ],
)
def test_what_does_not_go_with_it(start: Callable[..., Engine], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start("qwen3", **options)


def test_layers_that_keep_states_are_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="needs a model whose layers keep no states"):
        Engine(str(checkpoint("qwen3-next")), in_process=True, enable_deterministic_inference=True, skip_tokenizer_init=True)
