"""Models with sliding windows on a real runner, far beyond the window: each page behind it is another row's, or NaN."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from checkpoints import load_model

from jaxserve.aot.hlo import copies_of
from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build_runner
from jaxserve.executor.kv_cache import KVPool
from jaxserve.models import ModelConfig
from jaxserve.runner import KVGroup, PageUpdates, RowState, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

PAGE_SIZE, WINDOW, CHUNK, NUM_NEW = 4, 8, 12, 12
PROMPT_LENS = (61, 40, 23)
NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass
class Row:
    prompt: list[int]
    length: int = 0  # tokens in the cache
    sampled: list[int] = dataclasses.field(default_factory=list)

    @property
    def decodes(self) -> bool:
        return self.length >= len(self.prompt)


class Host:
    """Rows and their pages, as a scheduler and its cache would keep them. A page that no row holds is NaN when a step runs."""

    def __init__(self, runner: ModelRunner, model: Path, prompts: list[list[int]]) -> None:
        self.runner = runner
        self.pools = pools_of(runner, model)
        self.rows = [Row(prompt) for prompt in prompts]
        self.free = [list(range(group.num_pages)) for group in runner.spec.kv_groups]
        self.held: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # (group, row) -> index -> page
        self.holders: dict[tuple[int, int], set[int]] = defaultdict(set)  # (group, page) -> all rows that ever held it

    def run(self) -> None:
        """Chunks of one prompt after the other, beside the decode steps of the rows that are done with theirs."""
        while any(len(row.sampled) < NUM_NEW for row in self.rows):
            decoding = [i for i, row in enumerate(self.rows) if row.decodes and len(row.sampled) < NUM_NEW]
            waiting = [i for i, row in enumerate(self.rows) if not row.decodes]
            self.step(decoding, waiting[:1])

    def step(self, decoding: list[int], chunk: list[int]) -> None:
        indices = [*decoding, *chunk]
        added = [1] * len(decoding) + [min(CHUNK, len(self.rows[i].prompt) - self.rows[i].length) for i in chunk]
        tokens = [token for i in chunk for token in self.rows[i].prompt[self.rows[i].length :][:CHUNK]]
        new = [self.row_state(i) for i in chunk if self.rows[i].length == 0]
        for i, count in zip(indices, added, strict=True):
            self.rows[i].length += count
        updates = self.grow(indices)
        self.poison()
        step = StepInput(
            mode=ForwardMode.MIXED if decoding and chunk else ForwardMode.EXTEND if chunk else ForwardMode.DECODE,
            rows=np.asarray(indices, np.int32),
            seq_lens=np.asarray([self.rows[i].length for i in indices], np.int32),
            extend_lens=np.asarray(added, np.int32),
            num_decode_rows=len(decoding),
            input_ids=np.asarray(tokens, np.int32),
            sample=np.asarray([self.rows[i].decodes for i in indices]),
            page_updates=updates,
            new_rows=new,
            needs_sampling=False,
            needs_adjusting=False,
            needs_logprobs=False,
            needs_top_logprobs=False,
        )
        output = self.runner.fetch(launch(self.runner, step))
        for at, i in enumerate(indices):
            if self.rows[i].decodes:
                self.rows[i].sampled.append(int(output.token_ids[at, 0]))
            self.give_back(i)

    def row_state(self, i: int) -> RowState:
        prompt_len = len(self.rows[i].prompt)
        return RowState(i, SamplingParams(temperature=0), 0, prompt_len, NOTHING, NOTHING, NOTHING)

    def grow(self, indices: list[int]) -> PageUpdates:
        """Pages for what the step adds, the one given back last first."""
        entries = []
        for group, free in enumerate(self.free):
            for i in indices:
                held = self.held[group, i]
                for index in range(max(held, default=-1) + 1, -(-self.rows[i].length // PAGE_SIZE)):
                    held[index] = free.pop()
                    self.holders[group, held[index]].add(i)
                    entries.append((i, index, held[index], group))
        return PageUpdates(*np.asarray(entries, np.int32).reshape(-1, 4).T)

    def give_back(self, i: int) -> None:
        """What the row's next token, at position `length`, does not see."""
        for group, spec in enumerate(self.runner.spec.kv_groups):
            held = self.held[group, i]
            for index in list(held):
                last = (index + 1) * PAGE_SIZE - 1
                if spec.window is not None and last <= self.rows[i].length - spec.window:
                    self.free[group].append(held.pop(index))

    def poison(self) -> None:
        pages = np.concatenate([pages_of(pool, free) for pool, free in zip(self.pools, self.free, strict=True)])
        self.runner.kv_pool = jax.tree.map(
            lambda array: jax.device_put(with_nan(array, pages), array.sharding), self.runner.kv_pool
        )


def pools_of(runner: ModelRunner, model: Path) -> list[KVPool]:
    """One behind the other."""
    config = ModelConfig.from_pretrained(model).for_context(runner.spec.context_len)
    pools: list[KVPool] = []
    for group in runner.spec.kv_groups:
        pools.append(KVPool(pools[-1].end if pools else 0, config.windows.count(group.window), group.num_pages))
    return pools


def pages_of(pool: KVPool, pages: list[int]) -> np.ndarray:
    """Where these pages of a group lie, in all of its layers."""
    layers = pool.base + np.arange(pool.num_layers) * pool.num_pages
    return (layers[:, None] + np.asarray(pages, int)).reshape(-1)


def with_nan(array: jax.Array, pages: np.ndarray) -> np.ndarray:
    changed = np.array(array)
    changed[pages] = np.nan
    return changed


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def model(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint(request.param)


@pytest.fixture(scope="module")
def runner(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    args = ServerArgs(
        model_path=str(model),
        page_size=PAGE_SIZE,
        max_total_tokens=256 if "gemma3" in model.name else 64,
        swa_full_tokens_ratio=0.25,
        max_running_requests=4,
        context_length=100,
        chunked_prefill_size=16,
        decode_row_buckets=(4,),
        compilation_cache_dir=str(tmp_path_factory.mktemp("cache")),
    )
    return build_runner(args, show_progress=False).runner


def test_groups_of_a_model(runner: ModelRunner, model: Path) -> None:
    window = KVGroup(64 // PAGE_SIZE, WINDOW)
    assert runner.spec.kv_groups == ((KVGroup(256 // PAGE_SIZE), window) if "gemma3" in model.name else (window,))


def test_tokens_do_not_depend_on_pages_behind_the_window(runner: ModelRunner, model: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 300, length).tolist() for length in PROMPT_LENS]
    host = Host(runner, model, prompts)
    host.run()
    torch_model = load_model(model)
    for row in host.rows:
        assert row.sampled == next_tokens(torch_model, row.prompt + row.sampled)[len(row.prompt) - 1 : -1]
    last = len(runner.spec.kv_groups) - 1
    shared = [page for (group, page), rows in host.holders.items() if group == last and len(rows) > 1]
    assert len(shared) > 4, "pages did not change hands"


def next_tokens(torch_model: Any, tokens: list[int]) -> list[int]:
    """What is likeliest behind each of them."""
    with torch.inference_mode():
        found: list[int] = torch_model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()
    return found


def test_the_pools_are_updated_in_place(runner: ModelRunner) -> None:
    for bucket in runner._buckets.all:
        program = runner._pipeline.own[-1].programs[bucket]
        for array in jax.tree.leaves(runner.kv_pool):
            made = copies_of(program.as_text(), array.shape)
            assert "copy" not in {instruction.opcode for instruction in made}, (bucket.name, made)
            assert program.memory_analysis().alias_size_in_bytes >= array.nbytes
