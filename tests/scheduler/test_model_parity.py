"""Tokens and logprobs of scheduler and runner against Transformers, without processes and HTTP (tests/parity.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from parity import CACHED_OUTPUT_LEN, IN_PROCESS, NUM_TOP, Oracle, Served
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner

FEW_ROWS = {"max_running_requests": 8, "decode_row_buckets": (8,)}  # of one number: fewest programs; requests have to wait


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sampling programs are much the same for all models."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("served", IN_PROCESS, ids=str)
def test_tokens_equal_those_of_transformers(
    served: Served, checkpoint: Callable[[str], Path], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    model = checkpoint(served.case)
    oracle = Oracle(model)
    prompts = oracle.prompts()
    options = served.options(oracle.context_len) | FEW_ROWS
    args = ServerArgs(model_path=str(model), compilation_cache_dir=compiled, random_seed=1, **options)
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args, overlap=served.overlap)
    for seen, output_len in ((False, oracle.output_len), (True, CACHED_OUTPUT_LEN)):
        how = {"ignore_eos": True, "return_logprob": True, "top_logprobs_num": NUM_TOP}
        rids = [harness.submit(prompt, output_len, **how) for prompt in prompts]
        harness.run()
        for prompt, rid in zip(prompts, rids, strict=True):
            answer = harness.answer(rid)
            logprobs = np.concatenate([part.logprobs for part in answer.logprobs])
            top = np.concatenate([part.top_logprobs for part in answer.logprobs])
            oracle.check(prompt, answer.token_ids, logprobs, top[:, :NUM_TOP], output_len)
            oracle.check_hit(served, len(prompt), answer.cached_tokens, seen=seen)
    assert harness.scheduler.internal_state()["runner"]["compiles_after_ready_total"] == 0
