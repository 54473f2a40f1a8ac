"""The border between scheduling and execution: what a step needs, what it returns, and who can run it.

NumPy only. The scheduler never sees a JAX array and the executor never sees a request, so every scheduling rule can be
tested with a fake runner whose tokens are computed by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import numpy as np

from jaxserve.commands import Command
from jaxserve.types import ForwardMode, SamplingParams


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Layers whose KV lies in pages of one pool and one page table, and what the scheduler must know of them."""

    num_pages: int  # pages the scheduler may hand out: 0 .. num_pages - 1
    window: int | None = None  # tokens the layers see, the newest included; pages behind are free again. None: all

    def kept_tokens(self, length: int, page_size: int) -> int:
        """Most tokens whose pages a sequence of `length` holds between two steps, pages begun included."""
        return length if self.window is None else min(length, self.window + 2 * page_size)


@dataclasses.dataclass(frozen=True)
class Vectors:
    """What the model makes of texts: one vector, or one for each token."""

    size: int
    gives: Literal["embedding", "scores", "token_scores"]  # to compare texts by, or a number for each label
    of_tokens: bool = False  # each token has one
    needs_whole: bool = False  # of all of a text's tokens; else of its last one, and what is cached need not be computed
    normalizes: bool = False  # an embedding is to be of length 1; steps do not see to that
    labels: tuple[str, ...] = ()
    activation: Literal["sigmoid", "softmax", "none"] = "none"  # of scores, where probabilities are wanted; nor to this


@dataclasses.dataclass(frozen=True)
class RunnerSpec:
    """What the runner can hold; fixed once it is ready."""

    page_size: int  # tokens per KV page
    kv_groups: tuple[KVGroup, ...]  # the group that sees all tokens, if there is one, comes first
    max_rows: int  # request rows: 0 .. max_rows - 1; also the most rows in one step
    context_len: int  # most tokens in one sequence, prompt and output
    max_step_tokens: int  # most tokens in one EXTEND or MIXED step, decode rows included
    vocab_size: int
    hidden_size: int  # of an embedding
    eos_token_ids: tuple[int, ...]
    max_top_logprobs: int
    num_draft_tokens: int = 1  # most tokens that a DECODE step adds to a row: the one sampled last and the drafts behind it
    returns_hidden_states: bool = False  # whether a step may ask for them
    experts_shape: tuple[int, int] | None = None  # layers with experts, and a token's in each; None: no step may ask for them
    logprobs_after_temperature: bool = False  # of sampled tokens; else they are of the model's own distribution
    moves_logits: bool = False  # whether the host may read and change a step's logits before they are sampled
    counts_experts: bool = False  # whether it can record how many tokens go to each expert
    num_snapshots: int = 0  # of states behind cached pages, in models whose layers keep some; 0: nothing is kept of them
    # Attention by data parallelism: rows are divided among so many shards, in order, each of which has pools and snapshots of
    # its own, as many as said above.
    num_shards: int = 1
    # Pipeline parallelism: so many steps are computed at a time, one in each stage, as long as none of them needs the results
    # of another that is under way.
    num_stages: int = 1
    keeps_kv: bool = True  # False: only during a step, which has all of a text
    generates: bool = True  # tokens are sampled; else steps compute vectors alone, of texts that are prefilled
    vectors: Vectors | None = None  # that a PoolQuery asks for, if it may
    num_token_ids: int = 0  # ids that tokens may have, their types included; 0: those of the vocabulary
    num_adapter_slots: int = 0  # LoRA adapters that rows of one step may use; 0: none can
    # How much more a prompt's token takes for each token before it, in what the first one takes; 0: not known, or nothing.
    attention_work_ratio: float = 0.0

    @property
    def rows_per_shard(self) -> int:
        assert self.max_rows % self.num_shards == 0, f"{self.max_rows} rows over {self.num_shards} shards"
        return self.max_rows // self.num_shards

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.context_len // self.page_size)

    @property
    def num_tables(self) -> int:
        """Page tables: of each KV group, and of the snapshots."""
        return len(self.kv_groups) + (self.num_snapshots > 0)

    @property
    def max_slots(self) -> int:
        """Most tokens of any step."""
        return max(self.max_step_tokens, self.max_rows * self.num_draft_tokens)

    @property
    def mask_words(self) -> int:
        """int32 words of a row's mask of allowed tokens."""
        return -(-self.vocab_size // 32)

    @property
    def max_total_tokens(self) -> int:
        """What the pools of the first group hold."""
        return self.num_shards * self.kv_groups[0].num_pages * self.page_size

    @property
    def max_sequence_tokens(self) -> int:
        """What one sequence may hold if it is alone. A window that has room for any step never ends one."""
        longest = self.context_len
        for group in self.kv_groups:
            tokens = group.num_pages * self.page_size
            if group.window is None or tokens < group.window + self.max_step_tokens + 2 * self.page_size:
                longest = min(longest, tokens)
        return longest


NO_SLOT = -1  # of a row without an adapter


@dataclasses.dataclass(frozen=True)
class AdapterLoad:
    """A LoRA adapter goes into a slot of the devices, before the step that brings this; `ReadAdapter` has read it."""

    slot: int  # 0 .. num_adapter_slots - 1; no row of this or a later step uses what it held
    adapter_id: int


@dataclasses.dataclass(frozen=True)
class RowState:
    """Everything a request row remembers on the device between its steps; written before the first step of a (re)admission."""

    row: int
    sampling: SamplingParams
    seed: int  # the request's own, or one drawn for it: sampling is a function of (seed, position, logits)
    prompt_len: int  # output position = sequence length - prompt_len
    stop_token_ids: np.ndarray  # int32: ids that min_new_tokens holds back (eos unless ignored, and stop_token_ids)
    output_ids: np.ndarray  # int32: tokens generated before a retraction, for the penalties
    token_ids: np.ndarray  # int32: the sequence as far as it is known, prompt and output_ids; drafts are looked up in it
    adapter_slot: int = NO_SLOT  # of the LoRA adapter that it runs with, as long as it holds the row


@dataclasses.dataclass(frozen=True)
class PageUpdates:
    """New page-table entries: the `index`-th page of request row `row` in KV group `group` is `page`. Four int32 arrays of one
    length. Behind the KV groups comes that of snapshots: there `page` is the snapshot of the state behind the page, or -1.
    Pages and snapshots are numbered within the row's shard."""

    rows: np.ndarray
    index: np.ndarray
    pages: np.ndarray
    groups: np.ndarray

    @staticmethod
    def of(rows: np.ndarray, index: np.ndarray, pages: np.ndarray, group: int = 0) -> PageUpdates:
        """Of one group."""
        return PageUpdates(rows, index, pages, np.full(len(rows), group, np.int32))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice | np.ndarray) -> PageUpdates:
        return PageUpdates(self.rows[part], self.index[part], self.pages[part], self.groups[part])


NO_TOKEN_ID = -1  # where a line of a ScoreQuery asks for nothing; of a token that is given as an embedding


@dataclasses.dataclass(frozen=True)
class ScoreQuery:
    """P questions about what the model expects behind tokens of a step.

    Slots count the step's tokens: its decode rows have num_draft_tokens each in a DECODE step and one each in others, then
    come the input_ids.
    """

    slots: np.ndarray  # int32 [P]
    targets: np.ndarray  # int32 [P]: the token behind, whose logprob is wanted; NO_TOKEN_ID where it is not known
    token_ids: np.ndarray  # int32 [P, I]: tokens asked for besides; NO_TOKEN_ID behind the last
    needs_top: bool


@dataclasses.dataclass(frozen=True)
class Scores:
    """The answers, line for line; of the model's own distribution."""

    logprobs: np.ndarray  # float32 [P]
    id_logprobs: np.ndarray  # float32 [P, I]
    top_ids: np.ndarray | None  # int32 [P, max_top_logprobs]
    top_logprobs: np.ndarray | None  # float32 [P, max_top_logprobs], descending


@dataclasses.dataclass(frozen=True)
class PoolQuery:
    """Parts of texts, P of them, whose tokens a step computes and of which vectors are wanted, by slot. A text's parts come in
    order, each once, unless its last token is all that matters (`Vectors.needs_whole`): then only that one's part does."""

    rows: np.ndarray  # int32 [P], distinct request rows
    first_slots: np.ndarray  # int32 [P], as in ScoreQuery
    counts: np.ndarray  # int32 [P] tokens, at least 1
    starts: np.ndarray  # int32 [P] the first one's position; 0: the text begins here
    ends: np.ndarray  # bool [P] the text is whole now, and its vector is wanted


@dataclasses.dataclass(frozen=True)
class EmbeddedTokens:
    """Neighbouring tokens of a step that are given as embeddings; in input_ids they are NO_TOKEN_ID.

    They go into the layers in the model's type. A factor that the model has for its own table is applied where Transformers
    applies it to given embeddings.
    """

    first_slot: int  # as in ScoreQuery
    values: np.ndarray  # float32 [n, hidden size]; the runner may keep it


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One step, as arrays over its R rows: first `num_decode_rows` decode rows, then the extend rows.

    A decode row goes on from what its previous step left on the device: the token it sampled last and, in a DECODE step, up to
    num_draft_tokens - 1 drafts behind it. With drafts the host does not know how long the row is: a decode row may then grow by
    at most its extend_lens, and seq_lens is an upper bound of its length.
    """

    mode: ForwardMode
    rows: np.ndarray  # int32 [R], distinct request rows
    seq_lens: np.ndarray  # int32 [R], tokens in the row's KV cache after this step
    extend_lens: np.ndarray  # int32 [R], tokens this step adds to the row; 1 for decode rows without drafts
    num_decode_rows: int
    input_ids: np.ndarray  # int32 [sum of the extend rows' extend_lens]
    sample: np.ndarray  # bool [R], False for a chunk that does not end its prompt: the row's token is not wanted
    page_updates: PageUpdates
    new_rows: list[RowState]
    needs_sampling: bool  # some row is not greedy
    needs_adjusting: bool  # some row has penalties, logit_bias or min_new_tokens
    needs_logprobs: bool  # some row returns logprobs
    needs_top_logprobs: bool  # some row returns top logprobs
    needs_masks: bool = False  # some row may not sample every token, or has its logits changed: `Runner.sample` may get either
    score_query: ScoreQuery | None = None
    hidden_slots: np.ndarray | None = None  # int32 [H]: tokens, as in ScoreQuery, whose hidden states are wanted
    expert_slots: np.ndarray | None = None  # int32 [H]: likewise, whose experts are wanted
    pool_query: PoolQuery | None = None
    embeds: Sequence[EmbeddedTokens] = ()  # by slot
    adapter_loads: Sequence[AdapterLoad] = ()

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return self.num_decode_rows + len(self.input_ids)


@dataclasses.dataclass(frozen=True)
class LogitLines:
    """P lines of a step's logits. The k-th token of its r-th row is sampled from line r * K + k, with the K of StepOutput."""

    lines: np.ndarray  # int32 [P], distinct
    logits: np.ndarray  # float32 [P, vocab_size]


# In place of a token id, where a row's logits give none.
BROKEN_LOGITS = -1  # one is NaN, or the largest infinite
NO_CANDIDATES = -2  # all tokens are ruled out


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step sampled, row for row of its StepInput. K is num_draft_tokens in a DECODE step, else 1.

    Row r gained the first num_tokens[r] of its tokens; the rest is garbage, as is all of a row with sample=False.
    """

    token_ids: np.ndarray  # int32 [R, K]; BROKEN_LOGITS or NO_CANDIDATES where there is none: always the row's last
    num_tokens: np.ndarray  # int32 [R]; at least 1 where sample is True
    logprobs: np.ndarray | None = None  # float32 [R, K], of the chosen tokens; see logprobs_after_temperature
    top_ids: np.ndarray | None = None  # int32 [R, K, max_top_logprobs]
    top_logprobs: np.ndarray | None = None  # float32 [R, K, max_top_logprobs], descending
    drafts: np.ndarray | None = None  # int32 [R, num_draft_tokens - 1] for the row's next DECODE step; -1 from where none is
    scores: Scores | None = None  # answers to the score_query
    hidden_states: np.ndarray | None = None  # float32 [H, hidden size] behind the final norm, of hidden_slots
    experts: np.ndarray | None = None  # int32 [H, *experts_shape] of expert_slots: by the checkpoint's numbers, best first
    # float32 [N, size of Vectors]: of the PoolQuery's parts that end their text, one behind the other, or of each token of each
    # part where tokens have one each. Not a number: the model gave none.
    pooled: np.ndarray | None = None


class Runner(Protocol):
    """Runs steps in the order they are launched. A step is launched in two phases, neither of which waits for the device:
    the forward pass, then sampling. So the host can still decide what may be sampled while the forward pass runs.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def forward(self, step: StepInput) -> Any:
        """Starts a step's forward pass and returns a handle. The step before must have been sampled."""
        ...

    def read_logits(self, handle: Any, lines: np.ndarray) -> np.ndarray:
        """float32 [P, vocab_size]: the model's logits on those lines, as in LogitLines, of a step that is not sampled yet.
        Waits for its forward pass."""
        ...

    def sample(self, handle: Any, masks: np.ndarray | None = None, changed: LogitLines | None = None) -> None:
        """Starts the step's sampling. `masks` int32 [R, K, ceil(vocab_size / 32)]: bit b of word w allows token 32 * w + b as
        the row's k-th; None: all tokens of all rows are allowed. `changed`: in place of the model's own. The runner keeps the
        arrays."""
        ...

    def fetch(self, handle: Any) -> StepOutput:
        """Waits for a sampled step. Each handle is fetched once."""
        ...

    def execute(self, command: Command) -> Future[None]:
        """Starts a command, which is carried out whole, or refused whole: then the result is a CommandError. `WeightsLost` is
        what is neither.

        It stands between steps: all steps launched before it must have been fetched, and none may be launched until it is
        done, nor while a part of the memory is released. Only those of `BesideSteps` may run beside them.
        """
        ...

    def annotate(self, name: str, **facts: Any) -> AbstractContextManager[Any]:
        """Around what the host does under that name, for a trace that runs; `step_num` marks the launch of a step."""
        ...

    def tend(self) -> int:
        """Between two steps: does what waits to be done there. Returns how many programs are still to come: until then steps
        may run in larger ones, which takes longer and changes nothing else. Cheap, and never waits for a compiler."""
        ...

    def internal_state(self) -> dict[str, Any]:
        """Numbers for /server_info: memory use, buckets, compile counts."""
        ...


def launch(runner: Runner, step: StepInput, masks: np.ndarray | None = None) -> Any:
    """Both phases of a step at once; the handle for `fetch`."""
    handle = runner.forward(step)
    runner.sample(handle, masks)
    return handle
