"""Embeddings and scores of scheduler and runner against sentence-transformers and Transformers, without processes and HTTP.

Every kind of model, pooling and head: each text alone, in a crowd (over several steps), in parts where the model may split it,
and again where the cache has its beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import Oracle
from scheduler_harness import Harness
from vector_checkpoints import CASES, MAX_LEN, VectorOracle, check

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner

CROWD = 24
# Rows and steps for a part of the crowd; decoders compute longer texts in parts.
OPTIONS: dict[str, Any] = {
    "max_running_requests": 16, "decode_row_buckets": (16,), "prefill_token_buckets": (512,), "page_size": 16,
    "context_length": MAX_LEN, "max_total_tokens": 8192, "random_seed": 1,
}  # fmt: skip
# What else the case is served with: over devices, in one step after the other, without the tree of prefixes.
VARIED: dict[str, dict[str, Any]] = {
    "bert-joined": {"tp_size": 2},
    "bert-cross": {"pp_size": 2},
    "modern-bert-mean": {"disable_overlap_schedule": True},
    "xlm-roberta-tokens": {"tp_size": 4},
    "qwen3-last": {"tp_size": 2, "attn_dp_size": 2},
    "qwen2-mean": {"tp_size": 2, "attn_dp_size": 2, "disable_overlap_schedule": True},
    "qwen3-tokens": {"pp_size": 2},
    "llama-reward": {"quantization": None, "tp_size": 4},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", CASES)
def test_vectors_equal_those_of_the_reference(
    name: str, vector_checkpoint: Callable[[str], Path], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    folder, case = vector_checkpoint(name), CASES[name]
    oracle = VectorOracle(name, folder)
    varied = VARIED.get(name, {})
    chunked = {"chunked_prefill_size": 64} if case.is_decoder else {}
    args = ServerArgs(model_path=str(folder), compilation_cache_dir=compiled, **OPTIONS | chunked | varied | case.options)
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args, overlap=not built.args.disable_overlap_schedule)
    prompts = oracle.prompts(CROWD)
    expected = [oracle.vectors(*prompt) for prompt in prompts]
    ids = [oracle.ids(*prompt) for prompt in prompts]
    for index in np.argsort([len(one) for one in ids])[[0, len(ids) // 2, -1]].tolist():
        rid = harness.pool(ids[index])
        harness.run()
        check(_vectors(harness, rid), expected[index], case)
    for _ in range(2):
        rids = [harness.pool(one) for one in ids]
        harness.run()
        for rid, vectors in zip(rids, expected, strict=True):
            check(_vectors(harness, rid), vectors, case)
    state = harness.scheduler.internal_state()
    assert state["runner"]["compiles_after_ready_total"] == 0 and state["num_used_tokens"] == 0


def test_a_model_that_could_generate_is_served_without_its_head(
    checkpoint: Callable[[str], Path], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--is-embedding: the last token's state, of length 1; the folder says nothing of vectors."""
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)
    folder = checkpoint("llama")
    oracle = Oracle(folder)
    args = ServerArgs(model_path=str(folder), compilation_cache_dir=compiled, is_embedding=True, **OPTIONS)
    built = build_runner(args, show_progress=False)
    assert not built.runner.spec.generates and "lm_head" not in built.runner.params[0]
    harness = Harness(runner=built.runner, server_args=built.args)
    prompts = oracle.prompts()[:12]
    rids = [harness.pool(prompt) for prompt in prompts]
    harness.run()
    for prompt, rid in zip(prompts, rids, strict=True):
        expected = np.asarray(oracle.hidden_states(prompt)[-1:])
        expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(_vectors(harness, rid), expected, atol=1e-4)


def _vectors(harness: Harness, rid: str) -> np.ndarray:
    """As the server makes them of what the scheduler sends."""
    answer, vectors = harness.answer(rid), harness.runner.spec.vectors
    assert answer.pooled is not None and answer.token_ids == [] and vectors is not None
    found = answer.pooled
    return found / np.linalg.norm(found, axis=1, keepdims=True) if vectors.normalizes else found
