"""The detokenizer process: BatchTokenIDOut in, BatchStrOut out.

It keeps, per unfinished sequence, what its decoder needs to go on and, where there are stop strings or patterns, a filter.
Everything else in a message passes through untouched. It learns of a request from the first message about it and forgets it
with the last one; it knows nothing of HTTP or models. It ends when every scheduler has passed on a ShutdownReq. There may be
several: a request's route says which one makes its texts, and who reads them.

A sequence whose text cannot be made ends here, with an error and without the others noticing. The scheduler learns of it by
way of the TokenizerManager; what it sends about the sequence until then is dropped.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.ipc import Inbox, Outbox
from jaxserve.messages import (
    DETOKENIZER,
    NO_STOP_TRIM,
    SKIP_SPECIAL_TOKENS,
    SPACES_BETWEEN_SPECIAL_TOKENS,
    TOKENIZER,
    BatchStrOut,
    BatchTokenIDOut,
    ControlRequest,
    DetokenizerInput,
    ProfileBegan,
    ProfileEnded,
    ShutdownReq,
    WorkerAddress,
    WorkerReady,
)
from jaxserve.metrics import Registry, Snapshot, count_process
from jaxserve.scheduler.control.desk import ControlDesk
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.garbage import settle_garbage_collector
from jaxserve.server.host_spans import HostSpans, next_in_chain
from jaxserve.server.output_routes import fronts_of
from jaxserve.server.stops import StopFilter, cut_at, stop_filter
from jaxserve.server.tokenizer import TextDecoder
from jaxserve.server.worker_process import WorkerContext, run_worker
from jaxserve.text.byte_level import ByteLevelDecoding
from jaxserve.text.incremental import IncrementalDecoder, WindowDecoding
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

# Unfinished sequences remembered. More than a scheduler can hold; only a scheduler that forgets to finish them gets here.
MAX_SEQUENCES = 1 << 16
WAITING_CONTROL_POLL_S = 0.05
_DROPPED = ""  # in place of a rid: nobody waits for this row
_DECODE_FLAGS = SKIP_SPECIAL_TOKENS | SPACES_BETWEEN_SPECIAL_TOKENS


@dataclasses.dataclass(slots=True)
class SequenceState:
    text: Any  # its decoder's
    stops: StopFilter | None  # None: nothing to look for, or it is wanted in the text


class Detokenizer:
    """Of all schedulers and all readers. Two schedulers may use the same rid: one that has died, and the one that its client
    turned to then. So may two readers, of which the scheduler refuses one."""

    def __init__(self, decoder: TextDecoder, max_sequences: int = MAX_SEQUENCES) -> None:
        self._decoders = {flags: _incremental(decoder, flags) for flags in range(_DECODE_FLAGS + 1)}
        self._max_sequences = max_sequences
        self._texts: dict[tuple[WorkerAddress, WorkerAddress], SequenceTexts] = {}  # by scheduler and reader
        self._metrics = Registry("detokenizer")
        self._seconds = self._metrics.counter("detokenizer_seconds_total")
        self._tokens = self._metrics.counter("detokenizer_tokens_total")

    @property
    def num_sequences(self) -> int:
        return sum(len(texts) for texts in self._texts.values())

    def metrics_snapshot(self) -> Snapshot:
        self._metrics.gauge("detokenizer_sequences").set(self.num_sequences)
        count_process(self._metrics, DETOKENIZER)
        return self._metrics.snapshot(time.time())

    def process(self, out: BatchTokenIDOut) -> BatchStrOut:
        began_s = time.perf_counter()
        message = self._texts_of(out.source, out.route.reader).process(out)
        self._seconds.inc(time.perf_counter() - began_s)
        self._tokens.inc(len(out.token_ids))
        return message

    def _texts_of(self, scheduler: WorkerAddress, reader: WorkerAddress) -> SequenceTexts:
        texts = self._texts.get((scheduler, reader))
        if texts is None:
            # Of one that was there before nobody waits for anything.
            for other, its_reader in list(self._texts):
                if other[:2] == scheduler[:2] and other < scheduler:
                    del self._texts[other, its_reader]
            texts = self._texts[scheduler, reader] = SequenceTexts(self._decoders, self._max_sequences)
        return texts


class SequenceTexts:
    """The texts of one scheduler's sequences, for one reader."""

    def __init__(self, decoders: Mapping[int, IncrementalDecoder], max_sequences: int) -> None:
        """`decoders`: by decode flags."""
        self._decoders = decoders
        self._max_sequences = max_sequences
        self._states: OrderedDict[str, SequenceState] = OrderedDict()
        self._abandoned: set[str] = set()  # ended here; the scheduler still runs them

    def __len__(self) -> int:
        return len(self._states)

    def process(self, out: BatchTokenIDOut) -> BatchStrOut:
        if self._abandoned:
            self._drop_abandoned(out)
        flags = out.decode_flags.tolist()
        failed: dict[int, Exception] = {}  # by row
        try:
            self._open_new(out, flags, failed)
            texts = self._new_texts(out, flags, failed)
        except Exception as error:
            texts = [""] * len(out.rids)
            failed = dict.fromkeys(range(len(out.rids)), error)
        for i, rid in enumerate(out.rids):
            try:
                texts[i] = self._without_stops(i, texts[i], out, flags[i])
            except Exception as error:
                failed.setdefault(i, error)
            if i in out.finished or i in failed:
                self._states.pop(rid, None)
        message = BatchStrOut(
            rids=out.rids,
            texts=texts,
            token_ids=out.token_ids,
            token_counts=out.token_counts,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=out.cached_tokens,
            source=out.source,
            weight_version=out.weight_version,
            finished=out.finished,
            logprobs=out.logprobs,
            input_logprobs=out.input_logprobs,
            hidden_states=out.hidden_states,
            experts=out.experts,
            pooled=out.pooled,
            times=out.times,
        )
        if failed:
            self._end_failed(message, failed)
        return message

    def _without_stops(self, i: int, text: str, out: BatchTokenIDOut, flags: int) -> str:
        """What of the row's new text may be shown now."""
        state, reason = self._states.get(out.rids[i]), out.finished.get(i)
        stops = None if state is None else state.stops
        if reason is not None:
            return _last_text(text, stops, reason, trim=not flags & NO_STOP_TRIM)
        return text if stops is None else stops.push(text)

    def _drop_abandoned(self, out: BatchTokenIDOut) -> None:
        """Takes the name off rows whose sequence has ended here."""
        for i, rid in enumerate(out.rids):
            if rid in self._abandoned:
                out.rids[i] = _DROPPED
                if i in out.finished:
                    self._abandoned.remove(rid)

    def _end_failed(self, message: BatchStrOut, failed: dict[int, Exception]) -> None:
        for i, error in failed.items():
            rid = message.rids[i]
            logger.error("The text of request %s could not be made.", rid, exc_info=error)
            if i not in message.finished and rid != _DROPPED:
                message.abandoned.append(rid)
                self._abandoned.add(rid)
            text = "The detokenizer failed to decode the request's tokens; the server's log says more."
            message.texts[i] = ""
            message.finished[i] = FinishReason.abort(text, 500, "InternalServerError")

    def _open_new(self, out: BatchTokenIDOut, flags: list[int], failed: dict[int, Exception]) -> None:
        states = self._states
        new: dict[int, list[int]] = {}  # decode flags -> indices
        for i, rid in enumerate(out.rids):
            if rid in states:
                states.move_to_end(rid)
            elif rid != _DROPPED:
                new.setdefault(flags[i] & _DECODE_FLAGS, []).append(i)
        for kind, indices in new.items():
            texts = self._open_texts(out, kind, indices, failed)
            for i, text in zip(indices, texts, strict=True):
                state = states[out.rids[i]] = SequenceState(text, None)
                try:
                    if not flags[i] & NO_STOP_TRIM:
                        state.stops = stop_filter(out.stops.get(i, []), out.stop_patterns.get(i, []))
                except Exception as error:
                    failed[i] = error
        self._forget_oldest(len(states) - max(self._max_sequences, len(out.rids)))

    def _open_texts(self, out: BatchTokenIDOut, kind: int, indices: list[int], failed: dict[int, Exception]) -> Sequence[Any]:
        decoder, tails = self._decoders[kind], [out.prompt_tails.get(i, []) for i in indices]
        try:
            return decoder.open(tails)
        except Exception as error:
            if len(indices) == 1:
                failed[indices[0]] = error
                return decoder.open([[]])
        return [text for i in indices for text in self._open_texts(out, kind, [i], failed)]

    def _forget_oldest(self, count: int) -> None:
        for _ in range(count):
            rid, _state = self._states.popitem(last=False)
            logger.warning("More than %d unfinished sequences: forgot the text state of %s.", self._max_sequences, rid)

    def _new_texts(self, out: BatchTokenIDOut, flags: list[int], failed: dict[int, Exception]) -> list[str]:
        """The text each row's new tokens added, before stop strings are looked at."""
        texts = [""] * len(out.rids)
        ids, counts = out.token_ids.tolist(), out.token_counts.tolist()
        groups: dict[int, list[int]] = {}
        new_tokens: list[list[int]] = []
        start = 0
        for i, count in enumerate(counts):
            tokens = ids[start : start + count]
            start += count
            reason = out.finished.get(i)
            if reason is not None and not flags[i] & NO_STOP_TRIM and _ends_with_stop_token(tokens, reason):
                tokens.pop()
            new_tokens.append(tokens)
            if (tokens or reason is not None) and i not in failed and out.rids[i] != _DROPPED:
                groups.setdefault(flags[i] & _DECODE_FLAGS, []).append(i)
        for kind, indices in groups.items():
            for i, text in zip(indices, self._advance(out, kind, indices, new_tokens, failed), strict=True):
                texts[i] = text
        return texts

    def _advance(
        self,
        out: BatchTokenIDOut,
        kind: int,
        indices: list[int],
        new_tokens: list[list[int]],
        failed: dict[int, Exception],
    ) -> list[str]:
        """All rows at once; if that fails, one by one, to find the one that makes it fail."""
        states, finished = self._states, out.finished
        try:
            return self._decoders[kind].advance(
                [states[out.rids[i]].text for i in indices],
                [new_tokens[i] for i in indices],
                [i in finished for i in indices],
            )
        except Exception as error:
            if len(indices) == 1:
                failed[indices[0]] = error
                return [""]
        return [text for i in indices for text in self._advance(out, kind, [i], new_tokens, failed)]


def _incremental(decoder: TextDecoder, flags: int) -> IncrementalDecoder:
    skip_special_tokens = bool(flags & SKIP_SPECIAL_TOKENS)
    bytes_of = decoder.token_bytes(skip_special_tokens=skip_special_tokens)
    if bytes_of is not None:
        return ByteLevelDecoding(bytes_of)

    def decode(batch: list[list[int]]) -> list[str]:
        return decoder.decode_batch(
            batch, skip_special_tokens=skip_special_tokens, spaces_between=bool(flags & SPACES_BETWEEN_SPECIAL_TOKENS)
        )

    return WindowDecoding(decode)


def _ends_with_stop_token(tokens: list[int], reason: FinishReason) -> bool:
    return bool(tokens) and reason.type == "stop" and isinstance(reason.matched, int) and tokens[-1] == reason.matched


def _last_text(text: str, stops: StopFilter | None, reason: FinishReason, *, trim: bool) -> str:
    matched = reason.matched if trim and reason.type == "stop" and isinstance(reason.matched, str) else None
    if stops is not None:
        return stops.finish(text, matched)
    return text if matched is None else cut_at(text, matched)


def work(context: WorkerContext) -> None:
    detokenizer = Detokenizer(wait_for_decoder(context))
    inbox = context.channels.inbox(context.address, DetokenizerInput)
    outboxes = {other: context.channels.outbox(other) for other in receivers_of(context.address, context.args)}
    to_main = outboxes[WorkerAddress(TOKENIZER)]
    try:
        to_main.send(WorkerReady(worker=context.address))
        if context.guest is None:
            settle_garbage_collector()
        control = ControlDesk(detokenizer, context.address, to_main.send)
        serve(context.address, context.args, detokenizer, inbox, outboxes, control)
    finally:
        inbox.close()
        for outbox in outboxes.values():
            outbox.close()


def receivers_of(worker: WorkerAddress, args: ServerArgs) -> set[WorkerAddress]:
    """Who gets messages from this detokenizer: those who read its texts, and who hears of profiles from it."""
    return {WorkerAddress(TOKENIZER), *fronts_of(args), next_in_chain(worker, args)}


def serve(
    worker: WorkerAddress,
    args: ServerArgs,
    detokenizer: Detokenizer,
    inbox: Inbox,
    outboxes: Mapping[WorkerAddress, Outbox],
    control: ControlDesk,
) -> None:
    """Until of every replica it was said that it ends. `outboxes`: to the `receivers_of` this worker."""
    num_ended, spans, next_told = 0, HostSpans(), outboxes[next_in_chain(worker, args)]
    while num_ended < args.dp_size:
        inbox.wait(timeout_s=WAITING_CONTROL_POLL_S if control else 60.0)
        for message in inbox.receive():
            if isinstance(message, ShutdownReq):
                num_ended += 1
            elif isinstance(message, ControlRequest):
                control.receive(message)
            elif isinstance(message, ProfileBegan):
                spans.begin(message)
                next_told.send(message)
            elif isinstance(message, ProfileEnded):
                message.spans[str(worker)] = spans.end(message)
                next_told.send(message)
            else:
                with spans("detokenize", len(message.rids)):
                    outboxes[message.route.reader].send(detokenizer.process(message))
        control.serve()


if __name__ == "__main__":
    sys.exit(run_worker(DETOKENIZER, work))
