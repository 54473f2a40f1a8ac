"""PrefillAdder: fills one prefill step with requests until a budget is used up.

The budgets, all in tokens (SGLang's):

    step     prompt tokens in this step: chunked_prefill_size, max_prefill_tokens and what the runner can take, less the decode
             rows of a mixed step. A prompt that does not fit is split at a page boundary; one prompt at a time may be split.
             Where shards share the step, each has an equal share of it, and one prompt in each may be split.
    memory   free and evictable KV, less what running requests may still need, less the same for those added here (`kv_demand`).
             An estimate: outputs count as at most CLIP_MAX_NEW_TOKENS, and retraction corrects what goes wrong.
    rows     free request rows, max_running_requests, prefill_max_requests.

Memory and rows are those of a shard (`shard_room`). A request goes to the cheapest one that has room for it. If that one's
share of this step is used up, another computes in this step what would have to wait; unless it would compute more than a share
that the first one has cached: then the request waits for the next step, and others go on.

If nothing else runs in a shard, a request is admitted whatever the estimate says, as long as its pages are there: it could only
ever wait for itself.

In-batch prefix sharing: a request that would compute at least SHARING_MIN_TOKENS tokens which another request of this very step
computes too is held back (DEFERRED); in the next step it finds them in the tree. SGLang does this for prompts whose cached
prefix is at most 32 tokens; here what counts is the part still to be computed, so it also covers a long prompt that is
prefilled in chunks while its copies (n > 1) wait. Of copies of a shorter prompt as many are computed as repeat fewer tokens
than that together.

It takes leases and pages from the cache for what it adds; the caller must launch it all.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from jaxserve.scheduler.adapters import Adapters
from jaxserve.scheduler.chunk_times import ChunkTimes
from jaxserve.scheduler.kv_demand import KVDemand
from jaxserve.scheduler.prefill_item import PrefillItem
from jaxserve.scheduler.req import Req
from jaxserve.scheduler.residents import Residents
from jaxserve.scheduler.shard_room import ShardRoom

CLIP_MAX_NEW_TOKENS = 4096
SHARING_MIN_TOKENS = 32


class AddResult(enum.Enum):
    ADDED = "added"
    DEFERRED = "deferred"  # its prefix is there in the next step, in a shard that can use it; others may go on
    NO_ADAPTER = "no adapter"  # its LoRA adapter is not here, or has no slot; others may go on
    NO_TOKENS = "no tokens"  # the KV cache is too full for it
    NO_ROW = "no row"
    STEP_FULL = "step full"


@dataclasses.dataclass(frozen=True)
class PrefillLimits:
    """What bounds every prefill step of a server."""

    step_tokens: int  # prompt tokens in a step
    splits_prompts: bool
    max_step_tokens: int  # the runner's, decode rows included
    max_running: int
    max_requests: int | None  # in one prefill step
    fills_up: bool  # a prompt that has no room left in a step does not keep shorter ones behind it out
    shard_tokens: int  # of a step that several shards share: each one's part, decode rows included
    chunk_times: ChunkTimes | None = None  # chunks get shorter as a prompt goes on

    def tokens_beside(self, num_decode_rows: int) -> int:
        """Prompt tokens that fit into a step together with decode rows."""
        return min(self.step_tokens, self.max_step_tokens) - num_decode_rows


class PrefillAdder:
    def __init__(
        self,
        rooms: Sequence[ShardRoom],
        residents: Residents,
        limits: PrefillLimits,
        adapters: Adapters,
        *,
        num_decode_rows: int,
    ) -> None:
        """`rooms`: of all shards. `num_decode_rows` share this step."""
        self._rooms = rooms
        self._residents = residents
        self._limits = limits
        self._adapters = adapters
        self._page_size = rooms[0].cache.page_size
        self._step_left = limits.tokens_beside(num_decode_rows)
        self._hard_left = limits.max_step_tokens - num_decode_rows
        # Beginnings of sequences that this step computes, and how many tokens of each are computed more than once.
        self._repeated_tokens: dict[tuple[str | None, bytes], int] = {}
        self.items: list[PrefillItem] = []

    @property
    def is_closed(self) -> bool:
        """Nobody can be added."""
        return all(room.is_closed for room in self._rooms)

    @property
    def has_room(self) -> bool:
        """A short prompt might still be added."""
        return self._step_left > 0 and not self._is_at_most_requests

    @property
    def _is_at_most_requests(self) -> bool:
        return self._limits.max_requests is not None and len(self.items) >= self._limits.max_requests

    @property
    def chunked_reqs(self) -> list[Req]:
        """The requests whose prompts are not complete after this step."""
        return [room.chunked_req for room in self._rooms if room.chunked_req is not None]

    def restart_memory(self, demands: Sequence[KVDemand]) -> None:
        """After a preemption: other requests run than before."""
        for room, demand in zip(self._rooms, demands, strict=True):
            room.restart(demand)

    def resume(self, req: Req, start: int) -> None:
        """The next chunk of a chunked request, which holds [0, start) already. If it cannot go on, nobody is added to its
        shard either."""
        assert req.lease is not None, f"{req.rid} holds no row"
        room = next(room for room in self._rooms if req.row in room.cache.rows)
        assert not room.items, f"{req.rid} must be resumed before others are added"
        end = self._chunk_end(room, req, start)
        if end <= start or not room.cache.grow(req.lease, start, end):
            room.close(req)
        else:
            self._append(room, req, start, end, is_new=False)

    def add(self, req: Req) -> AddResult:
        """Admits a waiting request to the cheapest shard that has room for it, or says why not; then nothing is held."""
        if not self.has_room:
            return AddResult.STEP_FULL
        if not self._adapters.may_run(req):
            return AddResult.NO_ADAPTER
        rooms = [room for room in self._rooms if room.cache.free_rows]
        if not rooms or len(self._residents) >= self._limits.max_running:
            return AddResult.NO_ROW
        token_ids = req.fill_ids
        places = self._cheapest_first(rooms, req, token_ids)
        if any(self._is_computed_in_this_step(req, token_ids, prefix_len) for _, prefix_len in places):
            return AddResult.DEFERRED
        reason, found_len = AddResult.NO_TOKENS, 0
        for room, prefix_len in places:
            if found_len - prefix_len >= self._limits.shard_tokens:
                return AddResult.DEFERRED
            result = self._add_to(room, req, token_ids, prefix_len)
            if result is AddResult.ADDED:
                return result
            if result is AddResult.STEP_FULL:
                reason, found_len = result, max(found_len, 0 if room.is_closed else prefix_len)
        return reason

    def _cheapest_first(self, rooms: Sequence[ShardRoom], req: Req, token_ids: np.ndarray) -> list[tuple[ShardRoom, int]]:
        """With how much of the request is cached there."""
        found = [(room, self._reusable_prefix_len(room, req, token_ids)) for room in rooms]
        return sorted(found, key=lambda one: one[0].cost(len(token_ids) - one[1]))

    def _add_to(self, room: ShardRoom, req: Req, token_ids: np.ndarray, prefix_len: int) -> AddResult:
        if room.is_closed:
            return AddResult.STEP_FULL
        if not self._fits_memory(room, req, prefix_len):
            return AddResult.NO_TOKENS
        if self._chunk_end(room, req, prefix_len) <= prefix_len:
            return AddResult.STEP_FULL
        return self._admit(room, req, token_ids)

    def _admit(self, room: ShardRoom, req: Req, token_ids: np.ndarray) -> AddResult:
        lease = room.cache.admit(token_ids, req.extra_key, priority=req.priority, most_reused=req.recompute_from)
        assert lease is not None, f"no row for {req.rid} although {room.cache.free_rows} are free"
        end = self._chunk_end(room, req, lease.prefix_len)
        # Only now is the prefix locked, and no longer counted as available.
        start = lease.prefix_len
        if end <= start or not self._fits_memory(room, req, start) or not room.cache.grow(lease, start, end):
            room.cache.release(lease)
            return AddResult.NO_TOKENS
        self._residents.attach(req, lease)
        self._append(room, req, start, end, is_new=True)
        return AddResult.ADDED

    def _reusable_prefix_len(self, room: ShardRoom, req: Req, token_ids: np.ndarray) -> int:
        """What `admit` would take from the tree: whole pages, and at least one token is left to compute."""
        matched_len = room.cache.match(token_ids[: req.recompute_from], req.extra_key).length_tokens
        return min(matched_len, self._longest_shared(len(token_ids)))

    def _fits_memory(self, room: ShardRoom, req: Req, prefix_len: int) -> bool:
        """At least the pages themselves if nothing else runs there; else with room for what the request may produce."""
        if room.is_alone and not room.items:
            return True  # growing finds out
        return room.demand.leaves_room(
            held=prefix_len, fill_len=req.fill_len, length=_expected_len(req), step_tokens=self._limits.step_tokens
        )

    def _chunk_end(self, room: ShardRoom, req: Req, start: int) -> int:
        """Where this step's part of the prompt ends: at the prompt's end, or at a page boundary, or (nothing fits) at start."""
        fill_len = req.fill_len
        extend_len = fill_len - start
        step_left = min(self._step_left, room.step_left)
        if self._limits.chunk_times is not None:
            in_step = self._limits.max_step_tokens - self._hard_left
            step_left = self._limits.chunk_times.longest(start, step_left, in_step)
        if extend_len <= min(step_left, self._hard_left):
            return fill_len
        if not self._may_split(req, extend_len):
            fits = not room.items and (not self.items or extend_len <= self._step_left) and extend_len <= self._hard_left
            return fill_len if fits else start
        if room.chunked_req is not None:
            return start
        return max((start + step_left) // self._page_size * self._page_size, start)

    def _may_split(self, req: Req, extend_len: int) -> bool:
        """Without chunked prefill, only a request that comes back and has outgrown the runner's steps is split."""
        return self._limits.splits_prompts or (req.has_begun and extend_len > self._limits.max_step_tokens)

    def _append(self, room: ShardRoom, req: Req, start: int, end: int, *, is_new: bool) -> None:
        item = PrefillItem(
            req=req, row=req.row, start=start, end=end, fill_len=req.fill_len, expected_len=_expected_len(req), is_new=is_new
        )
        assert item.is_last or end % self._page_size == 0, f"chunk of {req.rid} ends at {end}, inside a page"
        self.items.append(item)
        taken = self._share_taken(room, item)
        room.take(item, taken)
        self._step_left -= taken
        self._hard_left -= end - start
        self._note_shareable(room, req, start, end)

    def _share_taken(self, room: ShardRoom, item: PrefillItem) -> int:
        """Tokens of the step's budget: of a chunk as many as would take as long at the prompt's beginning, but no more than its
        shard has, also where it is a page that takes longer: others keep their shares."""
        chunk_times, length = self._limits.chunk_times, item.end - item.start
        if chunk_times is None or (item.is_last and item.is_new):
            return length
        return max(min(chunk_times.at_beginning(item.start, length), self._step_left, room.step_left), length)

    # --- in-batch prefix sharing

    def _sharing_len(self) -> int:
        """Whole pages of at least SHARING_MIN_TOKENS tokens."""
        return -(-SHARING_MIN_TOKENS // self._page_size) * self._page_size

    def _longest_shared(self, length: int) -> int:
        """How much of a sequence another one may find in the tree: whole pages, and a token is left to compute."""
        return (length - 1) // self._page_size * self._page_size

    def _note_shareable(self, room: ShardRoom, req: Req, start: int, end: int) -> None:
        if room.cache.disable_radix:
            return
        enough = start + self._sharing_len()
        for shared_end in {enough, min(enough, self._longest_shared(req.fill_len))}:
            if start < shared_end <= end:
                key = req.extra_key, req.fill_ids[:shared_end].tobytes()
                repeated = self._repeated_tokens.get(key)
                self._repeated_tokens[key] = 0 if repeated is None else repeated + shared_end - start

    def _is_computed_in_this_step(self, req: Req, token_ids: np.ndarray, prefix_len: int) -> bool:
        shared_end = min(prefix_len + self._sharing_len(), self._longest_shared(len(token_ids)))
        if not self._repeated_tokens or shared_end <= prefix_len:
            return False
        if req.recompute_from is not None and req.recompute_from < shared_end:
            return False  # it could not reuse that
        repeated = self._repeated_tokens.get((req.extra_key, token_ids[:shared_end].tobytes()))
        return repeated is not None and repeated + shared_end - prefix_len >= SHARING_MIN_TOKENS


def _expected_len(req: Req) -> int:
    """How long the sequence may become, as far as is planned for."""
    return req.fill_len + min(req.max_len - req.fill_len, CLIP_MAX_NEW_TOKENS)
