"""Generation: every request's way from the front door to the scheduler, and its chunks' way back.

    stream(GenerateReqInput, sink) -> check -> tokenize -> TokenizedGenerateReqInput -> scheduler
    sink <- LiveCall <- LiveTable.route <- BatchStrOut <- detokenizer

asyncio only: it is given a function that sends, and told what arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

import numpy as np
import psutil

from jaxserve.data_parallel import DataParallelController, Prompt, Replica, ReplicaUnavailableError
from jaxserve.messages import (
    AbortReq,
    BatchStrOut,
    BatchTokenizedGenerateReqInput,
    Message,
    Route,
    Sample,
    TokenizedGenerateReqInput,
)
from jaxserve.namespaces import adapter_namespace, cache_namespace
from jaxserve.runner import NO_TOKEN_ID
from jaxserve.server.fronts.shared import Shared
from jaxserve.server.journal.journal import Journal
from jaxserve.server.live_requests import CallFacts, LiveCall, LiveSequence, LiveTable
from jaxserve.server.logit_processors import RulePlan, plan_all, rules_of
from jaxserve.server.metrics import ServerMetrics, header_labels
from jaxserve.server.output_routes import Routes
from jaxserve.server.pooled_prompts import cut_length, encode_pooled, num_chars
from jaxserve.server.request_checks import (
    ModelLimits,
    check_patterns,
    check_prompt,
    check_shape,
    encode_prompts,
    fit_new_tokens,
    pattern_sets,
    sample_params,
)
from jaxserve.server.requests import ERR_TYPES, GenerateReqInput, RequestError, TextPair, new_rid
from jaxserve.server.routed_rank import rank_of_header
from jaxserve.server.sessions import Sessions
from jaxserve.server.sinks import ChunkSink
from jaxserve.server.text_lanes import INLINE_CHARS, TextLanes
from jaxserve.server.timelines import Timelines
from jaxserve.server.tokenizer import Tokenizer
from jaxserve.server.tracing import Tracer
from jaxserve.timeline import RequestTimeline
from jaxserve.types import FinishReason, LogitRules

# Texts of a batch that a thread tokenizes together.
_TEXT_CHARS_PER_PART = 64 * 1024
# A batch is checked, sent and aborted in parts of so many sequences, each some milliseconds of work; between them the loop, and
# the scheduler, serve others.
SEQUENCES_PER_PART = 256
HEALTH_CHECK_RID = "HEALTH_CHECK"

_RID_BYTES = 16
_CHARS_PER_TOKEN = 4  # more or less: which lane a text goes to depends on its length
_CHARS_PER_PATTERN_SET = INLINE_CHARS + 1  # compiling one takes milliseconds at worst: never on the loop
_ABORTED = FinishReason.abort("The request was aborted.")


@dataclasses.dataclass(frozen=True)
class _PromptPlan:
    """What was found out, or decided, about a prompt."""

    room: int  # for so many new tokens
    rule_plan: RulePlan
    rules: LogitRules | None
    route: Route  # of all its sequences
    default_seed: int | None  # where the request brings none


class Generation:
    def __init__(
        self,
        controller: DataParallelController,
        send: Callable[[int, Message], None],
        lanes: TextLanes,
        journal: Journal,
        metrics: ServerMetrics | None = None,
        tracer: Tracer | None = None,
        shared: Shared | None = None,
        routes: Routes | None = None,
    ) -> None:
        """`send` reaches the scheduler of a rank; what it is given arrives in that order. `metrics`, `tracer`: None where
        nobody counts, or traces. `shared`: None in a server's only process of this kind. `routes`: None where there is one
        detokenizer, and no front process."""
        self._shared = shared
        self._lanes = lanes
        self._controller = controller
        self._send = send
        self._journal = journal
        self._metrics = metrics
        self._tracer = tracer
        self._routes = routes or Routes()
        self.timelines = Timelines()
        if metrics is not None:
            self.timelines.observers.append(metrics.observe)
        free_rid = (lambda rid: None) if shared is None else shared.free_rid
        self._live = LiveTable(self.timelines.observe, controller.ended, free_rid)
        self._embeds_bytes = 0  # of requests that have not ended
        self._most_embeds_bytes = psutil.virtual_memory().total // 4 // (1 if shared is None else shared.num_processes)
        self.sessions = Sessions()

    @property
    def num_live(self) -> int:
        """Sequences whose terminal message has not come."""
        return len(self._live)

    @contextlib.asynccontextmanager
    async def stream(
        self,
        req: GenerateReqInput,
        sink: ChunkSink,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        bos_token_id: int | None = None,
    ) -> AsyncIterator[None]:
        """Sends the request; its chunks go to the sink. Entering raises RequestError for bad input; leaving aborts what still
        runs. The tokenizer is needed for prompts that are texts."""
        check_shape(req, limits)
        if req.pools:
            limits = limits.of_pooling
        self._check_rank(req)
        plans = plan_all(req, limits)
        sets = pattern_sets(req)
        kept_bytes = self._check_room(req)
        received_s, rids = time.time(), self._free_rids(req)
        sink = self._journal.open(req, rids, received_s, sink)
        facts = self._facts(req, received_s)
        facts.trace = None if self._tracer is None else self._tracer.begin(req)
        call = LiveCall(sink, req.num_sequences, facts)
        is_named = req.rids is not None
        sequences = [LiveSequence(rid, index, facts, call, is_named) for index, rid in enumerate(rids)]
        gaps = self._metrics.token_gaps.buffer(facts.labels) if self._metrics is not None and facts.is_observed else None
        for sequence in sequences:
            sequence.gaps = gaps
            self._live.add(sequence)
        self._embeds_bytes += kept_bytes
        try:
            if sets:
                await self._lanes.run(_CHARS_PER_PATTERN_SET * len(sets), functools.partial(check_patterns, sets))
            if req.input_embeds is not None:
                req.prompt_ids = [np.full(embeds.length, NO_TOKEN_ID, np.int32) for embeds in req.input_embeds]
            else:
                prompts = req.input_ids
                if prompts is None:
                    assert tokenizer is not None, "texts need a tokenizer"
                    prompts = await self._encode(tokenizer, req, limits)
                if req.pools:
                    prompts = _cut(prompts, req, limits)
                else:
                    prompts = self._with_sessions(req, sequences, prompts, limits, bos_token_id)
                req.prompt_ids = await _check_prompts(prompts, limits)
            rooms = _rooms(req, limits)
            rules = await self._rules(req, plans, limits, tokenizer)
            self._journal.accepted(sink)
            text_tail = [] if tokenizer is None else tokenizer.text_tail
            facts.sent_s = time.time()
            routes = [self._routes.next() for _ in rooms]
            seeds = itertools.repeat(limits.default_seed)
            await self._send_request(req, sequences, [*map(_PromptPlan, rooms, plans, rules, routes, seeds)], text_tail)
            yield
        finally:
            self._embeds_bytes -= kept_bytes
            self._leave(sequences)
            self._journal.close_request(sink)

    def _facts(self, req: GenerateReqInput, received_s: float) -> CallFacts:
        labels: tuple[str, ...] = ()
        if self._metrics is not None and self._metrics.custom_labels.names:
            brought = header_labels.get()
            own = self._metrics.custom_labels.of(req.custom_labels)
            labels = own if req.custom_labels or brought is None else brought
        return CallFacts(
            received_s,
            num_samples=req.num_samples,
            is_stream=req.stream,
            is_observed=not req.is_health_check,
            is_constrained=any(params.grammar is not None for params in req.sampling_params),
            as_arrays=req.as_arrays,
            labels=labels,
        )

    def _check_room(self, req: GenerateReqInput) -> int:
        """Bytes that its embeddings take until it has ended: the scheduler keeps them, to compute a retracted prompt again."""
        copies = -(-req.num_samples // SEQUENCES_PER_PART)
        wanted = copies * sum(embeds.nbytes for embeds in req.input_embeds or ())
        if wanted and self._embeds_bytes + wanted > self._most_embeds_bytes:
            message = (
                f"input_embeds of all requests may take {self._most_embeds_bytes >> 20} MiB, a quarter of this machine's "
                f"memory; {self._embeds_bytes >> 20} MiB are in use, and this request needs {wanted >> 20}."
            )
            raise RequestError(message, 503, "ServiceUnavailableError")
        return wanted

    def receive(self, out: BatchStrOut, *, hold: bool = False) -> None:
        """`hold`: its chunks wait for `release`."""
        self._live.route(out, hold=hold)
        if self._metrics is not None:
            self._metrics.token_gaps.settle()
        if out.abandoned:
            self._send(out.source.rank, AbortReq(rids=out.abandoned))

    def release(self) -> None:
        self._live.release()

    def abort_unsent(self, rid_prefix: str) -> None:
        """Of the requests whose rid starts so, those that the scheduler has not heard of end when they are tokenized."""
        for sequence in self._live.unsent(rid_prefix):
            sequence.aborted = True

    def recent_requests(self) -> list[RequestTimeline]:
        """Time lines of the newest that have ended, and of all that have not."""
        return [*self.timelines.recent, *self._live.timelines()]

    def ages(self) -> list[tuple[str, float]]:
        """The rids of what has not ended, and for how many seconds each has been here."""
        return self._live.ages()

    def end_all(self, reason: FinishReason) -> None:
        """From this side: nobody will send their last chunks any more."""
        self._live.end_all(reason)

    def end_replica(self, replica: Replica, reason: FinishReason) -> None:
        """What it had will get no last chunks from there."""
        self._live.end_replica(replica, reason)

    def _check_rank(self, req: GenerateReqInput) -> None:
        if not req.is_health_check and (named := rank_of_header()) is not None:
            req.data_parallel_rank = named
        rank, count = req.data_parallel_rank, len(self._controller.replicas)
        if rank is not None and not 0 <= rank < count:
            raise RequestError(
                f"data_parallel_rank must be in [0, {count}), the replicas of this server (--dp-size); got {rank}.",
                param="data_parallel_rank",
            )

    def _free_rids(self, req: GenerateReqInput) -> list[str]:
        """Of the sequences. They are taken before anything is awaited: then a second request of one of them is refused."""
        bases = req.rids if req.rids is not None else _draw_rids(req)
        n = req.num_samples
        rids = [base if n == 1 else f"{base}_{j}" for base in bases for j in range(n)]
        if len(set(rids)) < len(rids):
            twice = next(rid for rid, count in Counter(rids).items() if count > 1)
            raise RequestError(f"Duplicate request ID: the rids of a request must differ, {twice!r} comes twice.", param="rid")
        taken = next((rid for rid in rids if rid in self._live), None)
        if taken is None and self._shared is not None and req.rids is not None:
            taken = self._shared.take_rids(rids)
        if taken is not None:
            raise RequestError(f"Duplicate request ID: rid {taken!r} belongs to a request that is still running.", param="rid")
        return rids

    def _with_sessions(
        self,
        req: GenerateReqInput,
        sequences: list[LiveSequence],
        prompts: list[list[int]],
        limits: ModelLimits,
        bos_token_id: int | None,
    ) -> list[list[int]]:
        """The prompts, those of sessions behind what the sessions have. What is replaced there is aborted."""
        prompts, limits = list(prompts), dataclasses.replace(limits, allow_auto_truncate=False)
        for index, (options, sequence) in enumerate(zip(req.options, sequences, strict=False)):
            params = options.session_params
            if params is None:
                continue
            new_ids = check_prompt(prompts[index], limits)
            sequence.turn, replaced = self.sessions.begin(params, sequence.rid, new_ids, bos_token_id)
            prompts[index] = sequence.turn.prompt_ids().tolist()
            if replaced:
                self._abort(replaced)
            check_prompt(prompts[index], limits)
        return prompts

    async def _rules(
        self, req: GenerateReqInput, plans: list[RulePlan], limits: ModelLimits, tokenizer: Tokenizer | None
    ) -> list[LogitRules | None]:
        """Of each prompt. Where thinking is counted, the prompt's text is looked at."""
        is_open = req.thinking is not None and req.thinking.begin is None
        rules: list[LogitRules | None] = []
        for first in range(0, len(plans), SEQUENCES_PER_PART):
            part = plans[first : first + SEQUENCES_PER_PART]
            ids = req.prompt_ids[first : first + SEQUENCES_PER_PART]

            def find(part: list[RulePlan] = part, ids: list[np.ndarray] = ids) -> list[LogitRules | None]:
                pairs = zip(part, ids, strict=True)
                return [rules_of(plan, prompt, limits.reasoning, tokenizer, is_open=is_open) for plan, prompt in pairs]

            if any(plan.thinking_tokens is not None for plan in part):
                rules += await self._lanes.run(_CHARS_PER_TOKEN * sum(map(len, ids)), find)
            else:
                rules += find()
        return rules

    async def _send_request(
        self,
        req: GenerateReqInput,
        sequences: list[LiveSequence],
        plans: list[_PromptPlan],
        text_tail: list[int],
    ) -> None:
        """One message for each part and replica, with one entry per prompt in it. `text_tail`: see Tokenizer."""
        prompts = req.prompt_ids
        for first in range(0, len(sequences), SEQUENCES_PER_PART):
            if first:
                await asyncio.sleep(0)
            part = sequences[first : first + SEQUENCES_PER_PART]
            batches: dict[int, list[TokenizedGenerateReqInput]] = {}
            for prompt, group in itertools.groupby(part, lambda sequence: sequence.index // req.num_samples):
                ids = prompts[prompt]
                wanted = self._wanted(group, len(ids))
                if wanted:
                    message = _to_scheduler_form(req, prompt, wanted, ids, plans[prompt])
                    if req.input_embeds is not None:
                        message.input_embeds, message.prompt_tail = req.input_embeds[prompt].values, text_tail
                    batches.setdefault(self._dispatch(req, wanted, message), []).append(message)
            for rank, batch in batches.items():
                self._send(rank, batch[0] if len(batch) == 1 else BatchTokenizedGenerateReqInput(batch=batch))
        for embeds in req.input_embeds or ():
            embeds.values = None

    def _dispatch(self, req: GenerateReqInput, sequences: list[LiveSequence], message: TokenizedGenerateReqInput) -> int:
        """The rank of the replica that the prompt goes to, where its session went before. RequestError if none can take it."""
        turn = sequences[0].turn
        try:
            tickets = self._controller.dispatch(
                Prompt(message.input_ids, adapter_namespace(message.extra_key, message.lora_name)),
                [message.sampling_params.max_new_tokens] * len(sequences),
                rank=req.data_parallel_rank,
                preferred=None if turn is None else turn.session.rank,
                is_probe=req.is_health_check,
            )
        except ReplicaUnavailableError as error:
            raise RequestError(str(error), 503, ERR_TYPES[503]) from error
        for sequence, ticket in zip(sequences, tickets, strict=True):
            sequence.ticket = ticket
        rank = tickets[0].replica.rank
        if turn is not None:
            turn.session.rank = rank
        return rank

    async def _encode(self, tokenizer: Tokenizer, req: GenerateReqInput, limits: ModelLimits) -> list[list[int]]:
        """The ids of texts, of those that could be prompts."""
        texts: Sequence[str | TextPair] = req.prompts or req.pairs or ()
        encode: Callable[..., list[list[int]]] = functools.partial(encode_prompts, tokenizer, limits=limits)
        if req.pools:
            encode = functools.partial(encode_pooled, tokenizer, limits=limits, cut_to=cut_length(req, limits))
        total = sum(map(num_chars, texts))
        works = [functools.partial(encode, part) for part in _parts_of_texts(texts)]
        if total <= INLINE_CHARS:
            return works[0]()
        return list(itertools.chain.from_iterable(await self._lanes.run_all(total, works)))

    def _wanted(self, sequences: Iterable[LiveSequence], prompt_len: int) -> list[LiveSequence]:
        """Those that nobody aborted while their prompt was tokenized."""
        wanted = []
        for sequence in sequences:
            if sequence.aborted:
                self._live.end(sequence, _ABORTED, prompt_len)
            elif self._live.holds(sequence):  # else everything failed meanwhile
                wanted.append(sequence)
        return wanted

    def _leave(self, sequences: Sequence[LiveSequence]) -> None:
        """The call is over: what it has not seen the end of is aborted, at once and by exact rid."""
        running: list[str] = []
        for sequence in sequences:
            sequence.call = None
            if not sequence.is_sent:
                self._live.remove(sequence)
            elif self._live.holds(sequence):
                running.append(sequence.rid)
        # The last first: while the scheduler goes through the parts, none of those that wait takes the place of one that ran.
        for first in reversed(range(0, len(running), SEQUENCES_PER_PART)):
            self._abort(running[first : first + SEQUENCES_PER_PART])

    def _abort(self, rids: Iterable[str]) -> None:
        """Where they run."""
        for rank, some in self._live.by_rank(rids).items():
            self._send(rank, AbortReq(rids=some))


def _to_scheduler_form(
    req: GenerateReqInput, prompt: int, sequences: list[LiveSequence], ids: np.ndarray, plan: _PromptPlan
) -> TokenizedGenerateReqInput:
    n, options = req.num_samples, req.options[prompt]
    params, rest = req.sampling_params[prompt], (plan.room, plan.rule_plan.biases, plan.default_seed)
    first, *others = [sample_params(params, s.index % n, *rest) for s in sequences]
    return TokenizedGenerateReqInput(
        rid=sequences[0].rid,
        input_ids=ids,
        sampling_params=first,
        stream=req.stream,
        return_logprob=options.return_logprob,
        top_logprobs_num=options.top_logprobs_num if options.return_logprob else 0,
        logprob_start_len=options.logprob_start_len if options.return_logprob else -1,
        token_ids_logprob=list(options.token_ids_logprob) if options.return_logprob and options.token_ids_logprob else None,
        return_hidden_states=options.return_hidden_states,
        return_routed_experts=options.return_routed_experts,
        routed_experts_start_len=options.routed_experts_start_len,
        pools=req.pools,
        priority=options.priority,
        extra_key=cache_namespace(
            options.extra_key, options.cache_salt, req.input_embeds[prompt].key if req.input_embeds else None
        ),
        lora_name=options.lora_path or None,
        thinking=req.thinking,
        logit_rules=plan.rules,
        route=plan.route,
        more_samples=[
            Sample(sequence.rid, params.sampling_seed) for sequence, params in zip(sequences[1:], others, strict=True)
        ],
    )


def _parts_of_texts(texts: Sequence[str | TextPair]) -> Iterator[list[str | TextPair]]:
    part: list[str | TextPair] = []
    size = 0
    for text in texts:
        length = num_chars(text)
        if part and size + length > _TEXT_CHARS_PER_PART:
            yield part
            part, size = [], 0
        part.append(text)
        size += length
    yield part


def _cut(prompts: list[list[int]], req: GenerateReqInput, limits: ModelLimits) -> list[list[int]]:
    """What came as token ids; texts were cut by their tokenizer."""
    length = cut_length(req, limits)
    return prompts if length is None else [ids[:length] for ids in prompts]


async def _check_prompts(prompts: list[list[int]], limits: ModelLimits) -> list[np.ndarray]:
    checked: list[np.ndarray] = []
    for first in range(0, len(prompts), SEQUENCES_PER_PART):
        if first:
            await asyncio.sleep(0)
        checked += [check_prompt(ids, limits) for ids in prompts[first : first + SEQUENCES_PER_PART]]
    return checked


def _rooms(req: GenerateReqInput, limits: ModelLimits) -> list[int]:
    """New tokens that each prompt leaves room for."""
    pairs = zip(req.sampling_params, req.prompt_ids, strict=True)
    rooms = [fit_new_tokens(params, len(ids), limits, cut=req.cuts_new_tokens) for params, ids in pairs]
    if req.pools:
        limits.reply.check_vectors(limits.vectors, [len(ids) for ids in req.prompt_ids])
        return rooms
    return limits.reply.rooms(req, [len(ids) for ids in req.prompt_ids], rooms)


def _draw_rids(req: GenerateReqInput) -> list[str]:
    if req.is_health_check:
        return [f"{HEALTH_CHECK_RID}_{new_rid()}" for _ in range(req.num_prompts)]
    drawn = os.urandom(_RID_BYTES * req.num_prompts).hex()
    return [drawn[end - 2 * _RID_BYTES : end] for end in range(2 * _RID_BYTES, len(drawn) + 1, 2 * _RID_BYTES)]
