"""Every architecture under everything that serving does to it (`make families`): 64 greedy tokens and their logprobs against
Transformers, alone and in a crowd, chunked, cached, mixed, retracted, with drafts, on 1, 2 and 4 devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import CASES, is_first_of_its_architecture
from parity import NUM_TOP, OUTPUT_LEN, Oracle, prompts_for
from scheduler_harness import Harness

from jaxserve.config import ServerArgs
from jaxserve.executor import build, build_runner
from jaxserve.models import ModelConfig
from jaxserve.scheduler.control.continue_generation import ContinueGenerationReqInput
from jaxserve.scheduler.control.flush_cache import FlushCacheReqInput
from jaxserve.scheduler.control.pause_generation import PauseGenerationReqInput

pytestmark = pytest.mark.matrix

CHUNK = 32
ROWS = 8
MODES: dict[str, dict[str, Any]] = {
    "chunked": {"page_size": 16},
    "mixed": {"page_size": 1, "tp_size": 2, "enable_mixed_chunk": True},
    "drafts": {"page_size": 16, "tp_size": 4, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3},
    "retracted": {"page_size": 4, "disable_overlap_schedule": True},
}
# Of models with experts: over groups of devices that hold slices of the same ones, and in `drafts` over all four devices.
EXPERT_MODES: dict[str, dict[str, Any]] = {"mixed": {"ep_size": 1}, "retracted": {"tp_size": 4, "ep_size": 2}}
# Whose answers do not repeat themselves, so that no draft is right; of others of their kind some are.
UNFORESEEN = ("qwen3-next", "qwen3.5-moe", "bamba")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_transformers(
    case: str, mode: str, checkpoint: Callable[[str], Path], compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "select_devices", lambda device, tp_size: None)  # this process has its eight
    model = checkpoint(case)
    if not is_first_of_its_architecture(case, checkpoint):
        pytest.skip("another case has the same architecture")
    oracle = Oracle(model)
    output_len = min(OUTPUT_LEN, oracle.context_len // 2)
    options = {
        "context_length": oracle.context_len,
        "max_running_requests": ROWS,
        "max_total_tokens": 16384,
        "max_prefill_tokens": 512,
        "chunked_prefill_size": CHUNK,
        "decode_row_buckets": (ROWS,),
        "prefill_token_buckets": (512,),
    }
    options |= MODES[mode]
    if ModelConfig.from_pretrained(model).num_experts:
        options |= EXPERT_MODES.get(mode, {})
    args = ServerArgs(model_path=str(model), compilation_cache_dir=compiled, random_seed=1, **options)
    built = build_runner(args, show_progress=False)
    harness = Harness(runner=built.runner, server_args=built.args, overlap=not args.disable_overlap_schedule)
    prompts = prompts_for(oracle.config.vocab_size, oracle.context_len - output_len)
    alone, crowd = [prompts[13]], prompts[:16]
    for asked in (alone, crowd, crowd[-4:]):  # the last ones are in the cache
        how = {"ignore_eos": True, "return_logprob": True, "top_logprobs_num": NUM_TOP}
        rids = [harness.submit(prompt, output_len, **how) for prompt in asked]
        if mode == "retracted" and asked is crowd:
            harness.turn(12)  # some are amid their answers, some amid their prompts, some wait
            harness.control(PauseGenerationReqInput(mode="retract"))
            harness.turn(2)
            harness.control(FlushCacheReqInput())
            harness.turn(2)
            harness.control(ContinueGenerationReqInput())
        harness.run()
        for prompt, rid in zip(asked, rids, strict=True):
            answer = harness.answer(rid)
            logprobs = np.concatenate([part.logprobs for part in answer.logprobs])
            top = np.concatenate([part.top_logprobs for part in answer.logprobs])
            oracle.check(prompt, answer.token_ids, logprobs, top[:, :NUM_TOP], output_len)
    state = harness.scheduler.internal_state()
    assert bool(state["num_retractions"]) == (mode == "retracted")
    if mode == "drafts":
        assert (state["avg_spec_accept_length"] > 1) == (case not in UNFORESEEN)
