"""Tokens and logprobs of scheduler and runner against Transformers, without processes and HTTP (tests/parity.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import IN_PROCESS, Served, marked
from parity import CACHED_OUTPUT_LEN, NUM_TOP, Oracle, asked_of_prompt
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner

# Rows of one number: fewest programs; requests have to wait.
FEW_ROWS = {"max_running_requests": 8, "decode_row_buckets": (8,), "enable_return_hidden_states": True}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sampling programs are much the same for all models."""
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("served", marked(IN_PROCESS), ids=str)
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
        asked = [asked_of_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        rids = [
            harness.submit(prompt, output_len, ignore_eos=True, return_hidden_states=index % 8 == 6, **how)
            for index, (prompt, how) in enumerate(zip(prompts, asked, strict=True))
        ]
        harness.run()
        for prompt, how, rid in zip(prompts, asked, rids, strict=True):
            answer, start = harness.answer(rid), how["logprob_start_len"]
            logprobs = np.concatenate([part.logprobs for part in answer.logprobs])
            top = np.concatenate([part.top_logprobs for part in answer.logprobs])
            oracle.check(prompt, answer.token_ids, logprobs, top[:, :NUM_TOP], output_len)
            oracle.check_outputs(prompt, answer.token_ids, np.concatenate([part.id_logprobs for part in answer.logprobs]))
            if (of_prompt := answer.input_logprobs) is not None:
                found = of_prompt.logprobs
                pairs = np.stack([found.top_logprobs, found.top_ids], axis=-1)
                oracle.check_prompt(prompt, start, list(found.logprobs), list(pairs), list(found.id_logprobs))
            if harness.sent[rid].return_hidden_states:
                (whole,) = [states.prompt for states in answer.hidden_states if states.prompt is not None]
                later = [states.outputs for states in answer.hidden_states if states.outputs is not None]
                expected = oracle.hidden_states(prompt + answer.token_ids[:-1])
                np.testing.assert_allclose(np.concatenate([whole, *later]), expected, atol=2e-3)
            else:
                oracle.check_hit(served, len(prompt), start, answer.cached_tokens, seen=seen)
    embedded = _submit_embeddings(harness, oracle, prompts[5::6], oracle.output_len)
    harness.run()
    _check_embeddings(harness, oracle, embedded, oracle.output_len)
    assert harness.scheduler.internal_state()["runner"]["compiles_after_ready_total"] == 0


def _submit_embeddings(harness: Harness, oracle: Oracle, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
    """By rid: each prompt as it is, as the model's own embeddings of it, and with noise on them: then they are no token's."""
    submitted = {}
    for prompt in prompts:
        own = oracle.embed(prompt)
        noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(len(prompt)))
        for values in (None, own, own + own.std() * noise):
            embeds = False if values is None else values.numpy()
            rid = harness.submit(
                prompt, output_len, ignore_eos=True, embeds=embeds, return_logprob=True, top_logprobs_num=NUM_TOP
            )
            submitted[rid] = (prompt if values is None or values is own else None, values)
    return submitted


def _check_embeddings(harness: Harness, oracle: Oracle, submitted: dict[str, Any], output_len: int) -> None:
    for rid, (prompt, values) in submitted.items():
        answer = harness.answer(rid)
        logprobs = np.concatenate([part.logprobs for part in answer.logprobs])
        top = np.concatenate([part.top_logprobs for part in answer.logprobs])
        if prompt is not None:
            oracle.check(prompt, answer.token_ids, logprobs, top[:, :NUM_TOP], output_len)
        else:
            oracle.check_embedded(values, answer.token_ids, logprobs)
