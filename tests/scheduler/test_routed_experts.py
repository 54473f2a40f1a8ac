"""The experts of each token, of a real runner beneath the scheduler, against the routers of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from routers import assert_same_experts
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner

OPTIONS: dict[str, Any] = {
    "context_length": 256,
    "max_running_requests": 4,
    "decode_row_buckets": (4,),
    "prefill_token_buckets": (64,),
    "chunked_prefill_size": 32,
    "max_total_tokens": 1024,
    "grammar_backend": "none",
    "enable_return_routed_experts": True,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("qwen3-moe-some-layers", {"enable_return_hidden_states": True}),
    "mixed steps, drafts": (
        "mixtral",
        {"enable_mixed_chunk": True, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3},
    ),
    "shards, redundant experts": (
        "qwen3-moe",
        {"tp_size": 4, "attn_dp_size": 2, "ep_size": 4, "ep_num_redundant_experts": 4},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_token_has_its_routers_choices(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    case, options = CASES[name]
    model = checkpoint(case)
    args = ServerArgs(model_path=str(model), compilation_cache_dir=str(tmp_path), **(OPTIONS | options))
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 7, 40, 51, 70)]
    also = args.enable_return_hidden_states
    for _ in range(2):  # the second time they are cached
        starts = [0, 3, 40, 0, 38]
        rids = [
            harness.submit(prompt, 9 + 4 * index, ignore_eos=True, experts_from=start, return_hidden_states=also and index == 3)
            for index, (prompt, start) in enumerate(zip(prompts, starts, strict=True))
        ]
        silent = harness.submit(prompts[1], 12, ignore_eos=True)
        harness.run()
        answers = [harness.answer(rid) for rid in rids]
        sequences = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
        found = [np.concatenate(answer.experts) for answer in answers]
        assert_same_experts(model, sequences, starts, found)
        assert not harness.answer(silent).experts
    assert answers[4].cached_tokens == 32, "whole pages of 16 before the start"
    assert harness.scheduler.internal_state()["runner"]["compiles_after_ready_total"] == 0


def test_a_model_without_experts_is_refused(checkpoint: Callable[[str], Path]) -> None:
    args = ServerArgs(model_path=str(checkpoint("llama")), **OPTIONS)
    with pytest.raises(
        ValueError, match="--enable-return-routed-experts needs a model with experts; LlamaForCausalLM has none"
    ):
        build_runner(args, show_progress=False)


def test_stages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--enable-return-routed-experts needs --pp-size 1, .*; got --pp-size 2"):
        ServerArgs(model_path="m", pp_size=2, enable_return_routed_experts=True)
