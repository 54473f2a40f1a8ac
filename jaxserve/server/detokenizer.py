"""The detokenizer process: BatchTokenIDOut in, BatchStrOut out.

It keeps a token window and, where a request has stop strings or patterns, a stop filter per unfinished sequence. Everything
else in a message passes through untouched. It learns of a request from the first message about it and forgets it with the last
one; it knows nothing of aborts, HTTP or models. It ends when the scheduler passes on a ShutdownReq.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import OrderedDict

import zmq

from jaxserve.ipc import Receiver, Sender
from jaxserve.messages import (
    NO_STOP_TRIM,
    SKIP_SPECIAL_TOKENS,
    SPACES_BETWEEN_SPECIAL_TOKENS,
    BatchStrOut,
    BatchTokenIDOut,
    DetokenizerInput,
    ShutdownReq,
    WorkerReady,
)
from jaxserve.server.decoder_handover import wait_for_decoder
from jaxserve.server.stops import StopFilter, cut_at, stop_filter
from jaxserve.server.tokenizer import TextDecoder
from jaxserve.server.worker_process import WorkerContext, run_worker
from jaxserve.text.incremental import DecodeBatch, TokenWindow, advance, open_windows
from jaxserve.types import FinishReason

logger = logging.getLogger(__name__)

# Unfinished sequences remembered. More than a scheduler can hold; only a scheduler that forgets to finish them gets here.
MAX_SEQUENCES = 1 << 16
_DECODE_FLAGS = SKIP_SPECIAL_TOKENS | SPACES_BETWEEN_SPECIAL_TOKENS


@dataclasses.dataclass(slots=True)
class SequenceState:
    window: TokenWindow
    stops: StopFilter | None  # None: nothing to look for, or it is wanted in the text


class Detokenizer:
    def __init__(self, decoder: TextDecoder, max_sequences: int = MAX_SEQUENCES) -> None:
        self._text_decoder = decoder
        self._max_sequences = max_sequences
        self._states: OrderedDict[str, SequenceState] = OrderedDict()
        self._decoders = {flags: self._decoder(flags) for flags in range(_DECODE_FLAGS + 1)}

    @property
    def num_sequences(self) -> int:
        return len(self._states)

    def process(self, out: BatchTokenIDOut) -> BatchStrOut:
        flags = out.decode_flags.tolist()
        self._open_new(out, flags)
        texts = self._new_texts(out, flags)
        for i, rid in enumerate(out.rids):
            reason, stops = out.finished.get(i), self._states[rid].stops
            if reason is not None:
                texts[i] = _last_text(texts[i], stops, reason, trim=not flags[i] & NO_STOP_TRIM)
                del self._states[rid]
            elif stops is not None:
                texts[i] = stops.push(texts[i])
        return BatchStrOut(
            rids=out.rids,
            texts=texts,
            token_ids=out.token_ids,
            token_counts=out.token_counts,
            prompt_tokens=out.prompt_tokens,
            completion_tokens=out.completion_tokens,
            cached_tokens=out.cached_tokens,
            finished=out.finished,
            logprobs=out.logprobs,
            times=out.times,
        )

    def _open_new(self, out: BatchTokenIDOut, flags: list[int]) -> None:
        states = self._states
        new: dict[int, list[int]] = {}  # decode flags -> indices
        for i, rid in enumerate(out.rids):
            if rid in states:
                states.move_to_end(rid)
            else:
                new.setdefault(flags[i] & _DECODE_FLAGS, []).append(i)
        for kind, indices in new.items():
            windows = open_windows([out.prompt_tails.get(i, []) for i in indices], self._decoders[kind])
            for i, window in zip(indices, windows, strict=True):
                stops = None if flags[i] & NO_STOP_TRIM else stop_filter(out.stops.get(i, []), out.stop_patterns.get(i, []))
                states[out.rids[i]] = SequenceState(window, stops)
        self._forget_oldest(len(states) - max(self._max_sequences, len(out.rids)))

    def _forget_oldest(self, count: int) -> None:
        for _ in range(count):
            rid, _state = self._states.popitem(last=False)
            logger.warning("More than %d unfinished sequences: forgot the text state of %s.", self._max_sequences, rid)

    def _new_texts(self, out: BatchTokenIDOut, flags: list[int]) -> list[str]:
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
            if tokens or reason is not None:
                groups.setdefault(flags[i] & _DECODE_FLAGS, []).append(i)
        for kind, indices in groups.items():
            gained = advance(
                [self._states[out.rids[i]].window for i in indices],
                [new_tokens[i] for i in indices],
                [i in out.finished for i in indices],
                self._decoders[kind],
            )
            for i, text in zip(indices, gained, strict=True):
                texts[i] = text
        return texts

    def _decoder(self, flags: int) -> DecodeBatch:
        def decode(batch: list[list[int]]) -> list[str]:
            return self._text_decoder.decode_batch(
                batch,
                skip_special_tokens=bool(flags & SKIP_SPECIAL_TOKENS),
                spaces_between=bool(flags & SPACES_BETWEEN_SPECIAL_TOKENS),
            )

        return decode


def _ends_with_stop_token(tokens: list[int], reason: FinishReason) -> bool:
    return bool(tokens) and reason.type == "stop" and isinstance(reason.matched, int) and tokens[-1] == reason.matched


def _last_text(text: str, stops: StopFilter | None, reason: FinishReason, *, trim: bool) -> str:
    matched = reason.matched if trim and reason.type == "stop" and isinstance(reason.matched, str) else None
    if stops is not None:
        return stops.finish(text, matched)
    return text if matched is None else cut_at(text, matched)


def work(context: WorkerContext) -> None:
    detokenizer = Detokenizer(wait_for_decoder(context.paths.folder, context.args))
    with zmq.Context() as zmq_context:
        receiver = Receiver(zmq_context, context.paths.detokenizer, DetokenizerInput)
        sender = Sender(zmq_context, context.paths.tokenizer)
        try:
            sender.send(WorkerReady(worker=context.name))
            serve(detokenizer, receiver, sender)
        finally:
            receiver.close()
            sender.close()


def serve(detokenizer: Detokenizer, receiver: Receiver, sender: Sender) -> None:
    while True:
        receiver.wait(timeout_s=60.0)
        for message in receiver.receive():
            if isinstance(message, ShutdownReq):
                return
            sender.send(detokenizer.process(message))


if __name__ == "__main__":
    sys.exit(run_worker("detokenizer", work))
