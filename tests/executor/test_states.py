"""Models whose layers keep states, as the executor sees them: memory, options, rows that begin anew, memory given back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.commands import ReleaseMemory, ResumeMemory
from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build_runner
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.kv_cache import PagesAndStates
from jaxserve.executor.memory import DeviceMemory, memory_budget, memory_lines
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from jaxserve.runner import PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

ROWS, PAGE_SIZE = 2, 4
OPTIONS: dict[str, Any] = {
    "page_size": PAGE_SIZE,
    "max_running_requests": ROWS,
    "decode_row_buckets": (ROWS,),
    "prefill_token_buckets": (16,),
    "chunked_prefill_size": 16,
    "max_total_tokens": 64,
    "context_length": 48,
}
# Per layer of the case qwen3-next: what the convolution sees, and a matrix for each head. Three of its layers keep them.
STATE_BYTES = 4 * (3 * (2 * 4 * 16 + 8 * 24) + 8 * 16 * 24)


@pytest.fixture
def blueprint(checkpoint: Callable[[str], Path]) -> Callable[..., Blueprint]:
    def draw(case: str = "qwen3-next", **changes: Any) -> Blueprint:
        folder = checkpoint(case)
        args = ServerArgs(model_path=str(folder), dtype="float32", **{**OPTIONS, **changes})
        return Blueprint.draw(args, ModelConfig.from_pretrained(folder), make_mesh(args.tp_size))

    return draw


@pytest.mark.parametrize(
    ("changes", "states"),
    [({}, 3 * ROWS), ({"max_mamba_cache_size": 11}, 11), ({"disable_radix_cache": True}, ROWS), ({"tp_size": 2}, 3 * ROWS)],
)
def test_states_are_memory_of_their_own(blueprint: Callable[..., Blueprint], changes: dict[str, Any], states: int) -> None:
    drawn = blueprint(**changes)
    assert drawn.num_snapshots == states - ROWS == drawn.spec((9,)).num_snapshots
    budget = memory_budget(drawn, DeviceMemory(1 << 30, 1 << 29), None)
    assert budget.states == 3 * (states + 1) * STATE_BYTES // drawn.args.tp_size
    assert f"{ROWS} requests, {states - ROWS} behind cached prefixes" in "\n".join(memory_lines(budget, drawn))
    arrays = jax.tree.leaves(drawn.programs((9,)).state_shapes()[0].kv)
    kept = sum(int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize for array in arrays)
    assert kept == budget.states + 9 * drawn.page_bytes[0]


def test_with_drafts_a_row_has_a_state_for_each_token_of_a_step(blueprint: Callable[..., Blueprint]) -> None:
    drawn = blueprint(speculative_algorithm="NGRAM", speculative_num_draft_tokens=3)
    budget = memory_budget(drawn, DeviceMemory(1 << 30, 1 << 29), None)
    assert drawn.num_snapshots == 2 * ROWS
    assert budget.states == 3 * (3 * (ROWS + 1) + 2 * ROWS) * STATE_BYTES
    assert f"3 of each of {ROWS} requests, {2 * ROWS} behind cached prefixes" in "\n".join(memory_lines(budget, drawn))


def test_a_model_without_states_has_no_memory_for_any(blueprint: Callable[..., Blueprint]) -> None:
    drawn = blueprint("qwen3")
    assert drawn.states is None and drawn.num_snapshots == 0 and drawn.spec((9,)).num_tables == 1
    assert "states" not in "\n".join(
        line for line in memory_lines(memory_budget(drawn, DeviceMemory(1 << 30, 1 << 29), None), drawn) if "hidden" not in line
    )


@pytest.mark.parametrize(
    ("case", "changes", "sentence"),
    [
        ("bamba", {"max_mamba_cache_size": 1}, r"at least --max-running-requests=2, as each request has a state; got 1\."),
        ("qwen3", {"max_mamba_cache_size": 9}, "needs a model whose layers keep states; Qwen3ForCausalLM has none"),
        ("bamba-groups", {"tp_size": 8}, "num_heads=4; got 8|num_kv_heads"),
        ("qwen3-next", {"tp_size": 8}, "linear_num_key_heads=4; got 8|num_heads=4; got 8"),
    ],
)
def test_what_cannot_be_is_said(blueprint: Callable[..., Blueprint], case: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        blueprint(case, **changes)


@pytest.fixture(scope="module")
def runner(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return build_runner(ServerArgs(model_path=str(checkpoint("qwen3-next")), **OPTIONS), show_progress=False).runner


NOTHING = np.zeros(0, np.int32)


def run(runner: ModelRunner, tokens: list[int], start: int, row: int = 0, snapshots: dict[int, int] | None = None) -> int:
    """The greedy token behind `tokens`, of which those from `start` on are computed. Row r has the r-th half of the pages.
    `snapshots`: page -> its snapshot, all others have none."""
    pages = np.arange(12, dtype=np.int32)
    entries = np.full(12, -1, np.int32)
    for page, snapshot in (snapshots or {}).items():
        entries[page] = snapshot
    rows = np.full(12, row, np.int32)
    updates = PageUpdates(
        np.concatenate([rows, rows]), np.concatenate([pages, pages]), np.concatenate([pages + 8 * row, entries]),
        np.repeat(np.arange(2, dtype=np.int32), 12),
    )  # fmt: skip
    state = RowState(row, SamplingParams(temperature=0), 0, len(tokens), NOTHING, NOTHING, np.array(tokens, np.int32))
    step = StepInput(
        mode=ForwardMode.EXTEND,
        rows=np.array([row], np.int32),
        seq_lens=np.array([len(tokens)], np.int32),
        extend_lens=np.array([len(tokens) - start], np.int32),
        num_decode_rows=0,
        input_ids=np.array(tokens[start:], np.int32),
        sample=np.array([True]),
        page_updates=updates,
        new_rows=[state],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )
    return int(runner.fetch(launch(runner, step)).token_ids[0, 0])


PROMPT = [5, 9, 11, 40, 3, 77, 21, 8, 15, 16, 100]


def test_a_row_begins_with_nothing(runner: ModelRunner) -> None:
    first = run(runner, PROMPT, 0)
    run(runner, PROMPT[::-1], 0)
    assert run(runner, PROMPT, 0) == first


def test_chunks_go_on_from_the_row_or_from_a_snapshot(runner: ModelRunner) -> None:
    whole = run(runner, PROMPT, 0)
    run(runner, PROMPT[:8], 0)
    assert run(runner, PROMPT, 8) == whole
    run(runner, PROMPT[:8], 0, snapshots={1: 2})
    run(runner, PROMPT[::-1], 0, row=1)
    assert run(runner, PROMPT, 8, snapshots={1: 2}) == whole
    # One amid the step, and one that the next goes on from.
    run(runner, PROMPT[:8], 0, snapshots={0: 3, 1: 1})
    assert run(runner, PROMPT, 8, snapshots={1: 1}) == whole
    assert run(runner, PROMPT, 4, snapshots={0: 3}) == whole


def test_states_are_given_back_with_the_pages(runner: ModelRunner) -> None:
    before = run(runner, PROMPT, 0)
    assert isinstance(runner.kv_pool[0], PagesAndStates)
    runner.execute(ReleaseMemory(("kv_cache",))).result()
    assert runner.kv_pool is None
    runner.execute(ResumeMemory(("kv_cache",))).result()
    assert all(not np.asarray(array).any() for array in runner.kv_pool[0].states.values())
    assert run(runner, PROMPT, 0) == before
