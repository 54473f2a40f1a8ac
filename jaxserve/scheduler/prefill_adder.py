"""PrefillAdder: fills one prefill step with requests until a budget is used up.

The budgets, all in tokens (SGLang's):

    step     prompt tokens in this step: chunked_prefill_size, max_prefill_tokens and what the runner can take, less the decode
             rows of a mixed step. A prompt that does not fit is split at a page boundary; one prompt at a time may be split.
    memory   free and evictable KV, less what running requests may still need, less the same for those added here (`kv_demand`).
             An estimate: outputs count as at most CLIP_MAX_NEW_TOKENS, and retraction corrects what goes wrong.
    rows     free request rows, max_running_requests, prefill_max_requests.

If nothing else runs, a request is admitted whatever the estimate says, as long as its pages are there: it could only ever wait
for itself.

In-batch prefix sharing: a request that would compute at least SHARING_MIN_TOKENS tokens which another request of this very step
computes too is held back (DEFERRED); in the next step it finds them in the tree. SGLang does this for prompts whose cached
prefix is at most 32 tokens; here what counts is the part still to be computed, so it also covers a long prompt that is
prefilled in chunks while its copies (n > 1) wait.

It takes leases and pages from the cache for what it adds; the caller must launch it all.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from jaxserve.cache.manager import CacheManager
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.residents import Residents

CLIP_MAX_NEW_TOKENS = 4096
SHARING_MIN_TOKENS = 32


class AddResult(enum.Enum):
    ADDED = "added"
    DEFERRED = "deferred"  # its prefix is being computed in this step; others may go on
    NO_TOKENS = "no tokens"  # the KV cache is too full for it
    NO_ROW = "no row"
    STEP_FULL = "step full"


@dataclasses.dataclass(frozen=True, slots=True)
class PrefillItem:
    """The tokens [start, end) of a request's sequence, to be computed in this step."""

    req: Req
    row: int
    start: int
    end: int
    fill_len: int  # tokens to compute before the first (next) output token
    is_new: bool  # first step of a (re)admission

    @property
    def is_last(self) -> bool:
        return self.end == self.fill_len


@dataclasses.dataclass(frozen=True)
class PrefillLimits:
    """What bounds every prefill step of a server."""

    step_tokens: int  # prompt tokens in a step
    splits_prompts: bool
    max_step_tokens: int  # the runner's, decode rows included
    max_running: int
    max_requests: int | None  # in one prefill step

    def tokens_beside(self, num_decode_rows: int) -> int:
        """Prompt tokens that fit into a step together with decode rows."""
        return min(self.step_tokens, self.max_step_tokens) - num_decode_rows


class PrefillAdder:
    def __init__(
        self,
        cache: CacheManager,
        residents: Residents,
        limits: PrefillLimits,
        *,
        num_decode_rows: int,
        demand: KVDemand,
        is_alone: bool,
    ) -> None:
        """`num_decode_rows` share this step; `demand` is that of the running requests, and grows (a chunked one's comes with
        `resume`); `is_alone`: nothing runs that could ever give memory back."""
        self._cache = cache
        self._residents = residents
        self._limits = limits
        self._page_size = cache.page_size
        self._step_left = limits.tokens_beside(num_decode_rows)
        self._hard_left = limits.max_step_tokens - num_decode_rows
        self._demand = demand
        self._is_alone = is_alone
        self._shared_keys: set[tuple[str | None, bytes]] = set()
        self.items: list[PrefillItem] = []
        self.chunked_req: Req | None = None  # the request whose prompt is not complete after this step

    def restart_memory(self, demand: KVDemand, is_alone: bool) -> None:
        """After a preemption: other requests run than before."""
        self._demand = demand
        for item in self.items:
            demand.add(item.end, _expected_len(item.req))
        self._is_alone = is_alone and not self.items

    def resume(self, req: Req, start: int) -> AddResult:
        """The next chunk of the chunked request, which holds [0, start) already."""
        assert req.lease is not None and not self.items, f"{req.rid} must be resumed before others are added"
        end = self._chunk_end(req, start)
        if end <= start:
            return AddResult.STEP_FULL
        if not self._cache.grow(req.lease, start, end):
            return AddResult.NO_TOKENS
        self._append(req, start, end, is_new=False)
        return AddResult.ADDED

    def add(self, req: Req) -> AddResult:
        """Admits a waiting request, or says why not; then nothing is held."""
        if self._step_left <= 0 or (self._limits.max_requests is not None and len(self.items) >= self._limits.max_requests):
            return AddResult.STEP_FULL
        if not self._cache.free_rows or len(self._residents) >= self._limits.max_running:
            return AddResult.NO_ROW
        token_ids = req.fill_ids
        prefix_len = self._reusable_prefix_len(req, token_ids)
        if self._is_computed_in_this_step(req, token_ids, prefix_len):
            return AddResult.DEFERRED
        if not self._fits_memory(req, prefix_len):
            return AddResult.NO_TOKENS
        if self._chunk_end(req, prefix_len) <= prefix_len:
            return AddResult.STEP_FULL
        return self._admit(req, token_ids)

    def _admit(self, req: Req, token_ids: np.ndarray) -> AddResult:
        lease = self._cache.admit(token_ids, req.extra_key, priority=req.priority, most_reused=req.recompute_from)
        assert lease is not None, f"no row for {req.rid} although {self._cache.free_rows} are free"
        end = self._chunk_end(req, lease.prefix_len)
        # Only now is the prefix locked, and no longer counted as available.
        start = lease.prefix_len
        if end <= start or not self._fits_memory(req, start) or not self._cache.grow(lease, start, end):
            self._cache.release(lease)
            return AddResult.NO_TOKENS
        self._residents.attach(req, lease)
        self._append(req, start, end, is_new=True)
        return AddResult.ADDED

    def _reusable_prefix_len(self, req: Req, token_ids: np.ndarray) -> int:
        """What `admit` would take from the tree: whole pages, and at least one token is left to compute."""
        matched_len = self._cache.match(token_ids[: req.recompute_from], req.extra_key).length_tokens
        return min(matched_len, (len(token_ids) - 1) // self._page_size * self._page_size)

    def _fits_memory(self, req: Req, prefix_len: int) -> bool:
        """At least the pages themselves if nothing else runs; else with room for what the request may produce."""
        if self._is_alone and not self.items:
            return True  # growing finds out
        return self._demand.leaves_room(
            held=prefix_len, fill_len=req.fill_len, length=_expected_len(req), step_tokens=self._limits.step_tokens
        )

    def _chunk_end(self, req: Req, start: int) -> int:
        """Where this step's part of the prompt ends: at the prompt's end, or at a page boundary, or (nothing fits) at start."""
        fill_len = req.fill_len
        extend_len = fill_len - start
        if extend_len <= min(self._step_left, self._hard_left):
            return fill_len
        if not self._may_split(req, extend_len):
            fits = not self.items and extend_len <= self._hard_left
            return fill_len if fits else start
        if self.chunked_req is not None:
            return start
        return max((start + self._step_left) // self._page_size * self._page_size, start)

    def _may_split(self, req: Req, extend_len: int) -> bool:
        """Without chunked prefill, only a request that comes back and has outgrown the runner's steps is split."""
        return self._limits.splits_prompts or (req.has_begun and extend_len > self._limits.max_step_tokens)

    def _append(self, req: Req, start: int, end: int, *, is_new: bool) -> None:
        item = PrefillItem(req=req, row=req.row, start=start, end=end, fill_len=req.fill_len, is_new=is_new)
        self.items.append(item)
        self._step_left -= end - start
        self._hard_left -= end - start
        self._demand.add(end, _expected_len(req))
        if not item.is_last:
            assert end % self._page_size == 0, f"chunk of {req.rid} ends at {end}, inside a page of {self._page_size}"
            self.chunked_req = req
        self._note_shareable(req, start, end)

    # --- in-batch prefix sharing

    def _sharing_len(self) -> int:
        """Whole pages of at least SHARING_MIN_TOKENS tokens."""
        return -(-SHARING_MIN_TOKENS // self._page_size) * self._page_size

    def _note_shareable(self, req: Req, start: int, end: int) -> None:
        shared_end = start + self._sharing_len()
        if shared_end <= end and not self._cache.disable_radix:
            self._shared_keys.add((req.extra_key, req.fill_ids[:shared_end].tobytes()))

    def _is_computed_in_this_step(self, req: Req, token_ids: np.ndarray, prefix_len: int) -> bool:
        shared_end = prefix_len + self._sharing_len()
        if not self._shared_keys or len(token_ids) <= shared_end:
            return False
        if req.recompute_from is not None and req.recompute_from < shared_end:
            return False  # it could not reuse that
        return (req.extra_key, token_ids[:shared_end].tobytes()) in self._shared_keys


def _expected_len(req: Req) -> int:
    """How long the sequence may become, as far as is planned for."""
    return req.fill_len + min(req.max_len - req.fill_len, CLIP_MAX_NEW_TOKENS)
