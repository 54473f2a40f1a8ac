"""A checkpoint with a NaN in it, and requests that leave themselves no token: each of them ends with one message and the
reason, and whoever stands beside it in the batch gets the tokens that it gets alone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scheduler_harness import Harness
from test_speculation import run

from jaxserve.config import ServerArgs
from jaxserve.executor import BuiltRunner, build_runner
from jaxserve.grammar import GrammarCompiler

BROKEN_TOKEN = 400  # the checkpoint's tokenizer never gives it
HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "sampling_seed": 3},
    "limited": {"temperature": 1.0, "top_p": 0.5, "top_k": 40, "sampling_seed": 4},
    "adjusted": {"frequency_penalty": 0.5, "min_new_tokens": 3, "return_logprob": True, "top_logprobs_num": 2},
    "constrained": {"regex": "[a-z ]+"},
}


@pytest.fixture(scope="module")
def built(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> BuiltRunner:
    folder = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(checkpoint("qwen3"), folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][BROKEN_TOKEN, 3] = np.nan
    save_file(weights, file, {"format": "pt"})
    args = ServerArgs(
        model_path=str(folder), compilation_cache_dir=str(tmp_path_factory.mktemp("compiled")), context_length=128,
        max_running_requests=8, decode_row_buckets=(8,), prefill_token_buckets=(64,), page_size=16, max_total_tokens=2048,
        chunked_prefill_size=64, speculative_algorithm="NGRAM", speculative_num_draft_tokens=3, random_seed=1,
    )  # fmt: skip
    return build_runner(args, show_progress=False)


@pytest.fixture(scope="module")
def grammars(built: BuiltRunner) -> Iterator[GrammarCompiler]:
    tokenizer_json = (Path(built.args.model_path) / "tokenizer.json").read_text()
    compiler = GrammarCompiler(tokenizer_json, built.runner.spec.vocab_size, built.runner.spec.eos_token_ids)
    yield compiler
    compiler.close()


def serve(built: BuiltRunner, grammars: GrammarCompiler, requests: dict[str, dict[str, Any]]) -> Harness:
    def submit(harness: Harness) -> None:
        for rid, fields in requests.items():
            harness.submit(max_new=20, rid=rid, **{"prompt": [5, 6, 7, 5, 6], "ignore_eos": True} | fields)

    return run(built, {}, submit, grammars=grammars)


def assert_aborted(harness: Harness, rid: str, status_code: int, words: str) -> None:
    finish = harness.answer(rid).finish
    assert finish is not None and finish.type == "abort", finish
    assert finish.status_code == status_code and words in (finish.message or ""), finish


@pytest.fixture(scope="module")
def healthy(built: BuiltRunner, grammars: GrammarCompiler) -> dict[str, list[int]]:
    """What the healthy requests are answered with when no other kind is there."""
    harness = serve(built, grammars, HOW)
    return {rid: harness.answer(rid).token_ids for rid in HOW}


@pytest.mark.parametrize("broken", HOW)
def test_a_prompt_that_meets_the_nan_ends_and_the_others_go_on(
    built: BuiltRunner, grammars: GrammarCompiler, healthy: dict[str, list[int]], broken: str
) -> None:
    bad = {"prompt": [5, 6, BROKEN_TOKEN, 5, 6], **HOW[broken]}
    harness = serve(built, grammars, {"first": bad, **HOW, "last": bad})
    for rid in ("first", "last"):
        assert_aborted(harness, rid, 500, "The model's logits were not numbers (NaN or infinite)")
        assert harness.answer(rid).token_ids == []
    for rid in HOW:
        assert harness.answer(rid).token_ids == healthy[rid], rid
        assert len(healthy[rid]) == 20 and BROKEN_TOKEN not in healthy[rid], "the test is void"


def test_a_request_that_comes_to_the_nan_ends_there(
    built: BuiltRunner, grammars: GrammarCompiler, healthy: dict[str, list[int]]
) -> None:
    harness = serve(built, grammars, {"bad": {"logit_bias": {BROKEN_TOKEN: 1e4}, "return_logprob": True}, **HOW})
    assert_aborted(harness, "bad", 500, "The model's logits")
    assert harness.answer("bad").token_ids == [BROKEN_TOKEN]
    assert {rid: harness.answer(rid).token_ids for rid in HOW} == healthy


EVERYTHING = dict.fromkeys(range(512), -math.inf)  # all of the checkpoint's vocabulary
NOTHING_LEFT: dict[str, dict[str, Any]] = {
    "all forbidden": {"logit_bias": EVERYTHING},
    "all forbidden, drawn": {"logit_bias": EVERYTHING, "temperature": 1.0},
    "what the grammar wants is forbidden": {"regex": "[0-9]+", "logit_bias": EVERYTHING},
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_a_request_that_leaves_itself_no_token_ends(
    built: BuiltRunner, grammars: GrammarCompiler, healthy: dict[str, list[int]], name: str
) -> None:
    harness = serve(built, grammars, {"bad": NOTHING_LEFT[name], **HOW})
    assert_aborted(harness, "bad", 400, "No token is left to sample")
    assert harness.answer("bad").token_ids == []
    assert {rid: harness.answer(rid).token_ids for rid in HOW} == healthy
