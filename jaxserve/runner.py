"""The border between scheduling and execution: what a step needs, what it returns, and who can run it.

NumPy only. The scheduler never sees a JAX array and the executor never sees a request, so every scheduling rule can be
tested with a fake runner whose tokens are computed by hand.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from jaxserve.types import ForwardMode, SamplingParams


@dataclasses.dataclass(frozen=True)
class RunnerSpec:
    """What the runner can hold; fixed once it is ready."""

    page_size: int  # tokens per KV page
    num_pages: int  # pages the scheduler may hand out: 0 .. num_pages - 1
    max_rows: int  # request rows: 0 .. max_rows - 1; also the most rows in one step
    context_len: int  # most tokens in one sequence, prompt and output
    max_step_tokens: int  # most tokens in one EXTEND or MIXED step, decode rows included
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_top_logprobs: int

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.context_len // self.page_size)

    @property
    def max_total_tokens(self) -> int:
        return self.num_pages * self.page_size


@dataclasses.dataclass(frozen=True)
class RowState:
    """Everything a request row remembers on the device between its steps; written before the first step of a (re)admission."""

    row: int
    sampling: SamplingParams
    seed: int  # the request's own, or one drawn for it: sampling is a function of (seed, position, logits)
    prompt_len: int  # output position = sequence length - prompt_len
    stop_token_ids: np.ndarray  # int32: ids that min_new_tokens holds back (eos unless ignored, and stop_token_ids)
    output_ids: np.ndarray  # int32: tokens generated before a retraction, for the penalties


@dataclasses.dataclass(frozen=True)
class PageUpdates:
    """New page-table entries: the `index`-th page of request row `row` is `page`. Three int32 arrays of one length."""

    rows: np.ndarray
    index: np.ndarray
    pages: np.ndarray


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step, as arrays over its R rows: first `num_decode_rows` decode rows, then the extend rows.

    A decode row's input token is the one its previous step sampled; it is still on the device and is not named here.
    """

    mode: ForwardMode
    rows: np.ndarray  # int32 [R], distinct request rows
    seq_lens: np.ndarray  # int32 [R], tokens in the row's KV cache after this step
    extend_lens: np.ndarray  # int32 [R], tokens this step adds to the row; 1 for decode rows
    num_decode_rows: int
    input_ids: np.ndarray  # int32 [sum of the extend rows' extend_lens]
    sample: np.ndarray  # bool [R], False for a chunk that does not end its prompt: the row's token is not wanted
    page_updates: PageUpdates
    new_rows: list[RowState]
    needs_sampling: bool  # some row is not greedy
    needs_adjusting: bool  # some row has penalties, logit_bias or min_new_tokens
    needs_logprobs: bool  # some row returns logprobs
    needs_top_logprobs: bool  # some row returns top logprobs

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.input_ids)


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step sampled, row for row of its StepInput. Rows with sample=False hold garbage."""

    next_token_ids: np.ndarray  # int32 [R]; -1 where the logits held a NaN
    logprobs: np.ndarray | None = None  # float32 [R], of the chosen token under the model's own distribution
    top_ids: np.ndarray | None = None  # int32 [R, max_top_logprobs]
    top_logprobs: np.ndarray | None = None  # float32 [R, max_top_logprobs], descending


class Runner(Protocol):
    """Runs steps in the order they are launched. Launching does not wait for the step, nor for the ones before it."""

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, step: StepInput) -> Any:
        """Starts the step and returns a handle for `fetch`."""
        ...

    def fetch(self, handle: Any) -> StepOutput:
        """Waits for a launched step. Each handle is fetched once."""
        ...

    def internal_state(self) -> dict[str, Any]:
        """Numbers for /server_info: memory use, buckets, compile counts."""
        ...
