"""The Detokenizer: messages in, messages out, with stop strings, flags and state that ends with its request."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import byte_level

from jaxserve.config import ServerArgs
from jaxserve.messages import (
    DETOKENIZER,
    FRONT,
    NO_STOP_TRIM,
    SKIP_SPECIAL_TOKENS,
    TOKENIZER,
    BatchStrOut,
    BatchTokenIDOut,
    ControlRequest,
    ProfileBegan,
    ProfileEnded,
    Route,
    ShutdownReq,
    TokenLogprobs,
    WorkerAddress,
    decoder,
    encode,
)
from jaxserve.scheduler.control.desk import ControlDesk
from jaxserve.scheduler.stops import StopMatcher, StopPatternMatcher, StopStringMatcher, TokenPieces
from jaxserve.server.detokenizer import Detokenizer, receivers_of, serve
from jaxserve.server.scheduler_process import TailDecoder
from jaxserve.server.stops import StopStringFilter, stop_filter
from jaxserve.server.tokenizer import RustDecoder
from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason


def new_detokenizer(**options: Any) -> Detokenizer:
    return Detokenizer(RustDecoder(byte_level()), **options)


def message(rows: dict[str, list[int]], flags: int = SKIP_SPECIAL_TOKENS, **fields: Any) -> BatchTokenIDOut:
    n = len(rows)
    counts = np.array([len(ids) for ids in rows.values()], np.int32)
    zeros = np.zeros(n, np.int32)
    return BatchTokenIDOut(
        rids=list(rows),
        token_ids=np.array([token for ids in rows.values() for token in ids], np.int32),
        token_counts=counts,
        decode_flags=np.full(n, flags, np.uint8),
        prompt_tokens=zeros,
        completion_tokens=counts,
        cached_tokens=zeros,
        **fields,
    )


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text).ids


def run(ids: list[int], reason: FinishReason, *, flags: int = SKIP_SPECIAL_TOKENS, stops: list[str] | None = None) -> list[str]:
    """One request, one token per message; the texts of all messages."""
    detokenizer, texts = new_detokenizer(), []
    for i, token in enumerate(ids):
        fields: dict[str, Any] = {"finished": {0: reason}} if i == len(ids) - 1 else {}
        if i == 0 and stops:
            fields["stops"] = {0: stops}
        texts += detokenizer.process(message({"r": [token]}, flags, **fields)).texts
    assert detokenizer.num_sequences == 0
    return texts


def test_text_is_the_text_of_the_tokens() -> None:
    text = "naïve 🚀 日本語, hello"
    assert "".join(run(ids_of(text), FinishReason.length_limit(3))) == text


def test_stop_string_is_cut_and_never_shown_early() -> None:
    texts = run(ids_of("hello END of it"), FinishReason.stop("of it"), stops=["of it", "ENDE"])
    assert "".join(texts) == "hello END "
    texts = run(ids_of("abc def"), FinishReason.length_limit(9), stops=["def!"])
    assert "".join(texts) == "abc def", "what only looked like a stop string comes out in the end"


def test_vectors_pass_through() -> None:
    detokenizer, vectors = new_detokenizer(), np.ones((1, 3), np.float32)
    ends = {0: FinishReason.length_limit(0), 1: FinishReason.abort("bye")}
    out = detokenizer.process(message({"a": [], "b": []}, finished=ends, pooled={0: vectors}))
    assert out.pooled == {0: vectors} and out.texts == ["", ""] and out.finished == ends
    assert detokenizer.num_sequences == 0


def test_no_stop_trim_keeps_the_stop_string() -> None:
    flags = SKIP_SPECIAL_TOKENS | NO_STOP_TRIM
    texts = run(ids_of("hello END"), FinishReason.stop("END"), flags=flags, stops=["END"])
    assert "".join(texts) == "hello END"


def test_stop_string_is_cut_without_having_been_announced() -> None:
    assert run([ids_of("a")[0]], FinishReason.stop("a")) == [""]


def test_stop_token_is_not_text() -> None:
    end = byte_level().token_to_id("<|end|>")
    tool = byte_level().token_to_id("<tool>")
    ids = [*ids_of("hi"), end]
    assert "".join(run(ids, FinishReason.stop(end), flags=0)) == "hi"
    assert "".join(run(ids, FinishReason.stop(end), flags=NO_STOP_TRIM)) == "hi<|end|>"
    assert "".join(run(ids, FinishReason.stop(end), flags=NO_STOP_TRIM | SKIP_SPECIAL_TOKENS)) == "hi"
    assert "".join(run([*ids_of("hi"), tool], FinishReason.stop(tool))) == "hi"
    assert "".join(run([*ids_of("hi"), tool], FinishReason.length_limit(2))) == "hi<tool>"


def test_flags_of_the_rows_of_one_message_are_kept_apart() -> None:
    end = byte_level().token_to_id("<|end|>")
    out = message({"a": [end, *ids_of("x")], "b": [end, *ids_of("x")]}, 0)
    out.decode_flags = np.array([SKIP_SPECIAL_TOKENS, 0], np.uint8)
    assert new_detokenizer().process(out).texts == ["x", "<|end|>x"]


def test_abort_before_the_first_token() -> None:
    detokenizer = new_detokenizer()
    out = detokenizer.process(message({"r": []}, finished={0: FinishReason.abort("bye")}))
    assert out.texts == [""]
    assert detokenizer.num_sequences == 0


def test_the_end_releases_what_was_held_back() -> None:
    detokenizer = new_detokenizer()
    half = byte_level().token_to_id("ð")
    assert detokenizer.process(message({"r": [half]})).texts == [""]
    assert detokenizer.process(message({"r": []}, finished={0: FinishReason.abort("bye")})).texts == ["\ufffd"]


def test_a_used_rid_starts_afresh() -> None:
    detokenizer = new_detokenizer()
    done = {0: FinishReason.length_limit(1)}
    for _ in range(2):
        assert detokenizer.process(message({"r": ids_of("hey")}, finished=done)).texts == ["hey"]


def test_state_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    detokenizer = new_detokenizer(max_sequences=3)
    for i in range(5):
        detokenizer.process(message({f"r{i}": ids_of("a")}))
    assert detokenizer.num_sequences == 3
    assert "forgot the text state of r0" in caplog.text
    assert detokenizer.process(message({"r0": ids_of("b")}, finished={0: FinishReason.length_limit(2)})).texts == ["b"]


def test_everything_else_passes_through_the_wire() -> None:
    out = message(
        {"a": [1], "b": [2, 3]},
        finished={1: FinishReason.stop(3)},
        logprobs={0: TokenLogprobs(logprobs=np.array([-1.5], np.float32))},
        times={1: RequestTimes(queue_entry_s=1, first_scheduled_s=2, first_token_s=3, finished_s=4)},
    )
    out = decoder(BatchTokenIDOut).decode(encode(out))
    result = decoder(BatchStrOut).decode(encode(new_detokenizer().process(out)))
    assert result.rids == ["a", "b"]
    assert result.token_ids.tolist() == [1, 2, 3]
    assert result.finished == {1: FinishReason.stop(3)}
    assert result.logprobs[0].logprobs.tolist() == [-1.5]
    assert result.times[1].finished_s == 4


@settings(max_examples=300, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_stop_filter_never_shows_a_stop_string(text: str, stops: list[str], data: st.DataObject) -> None:
    """Cut where the first stop string is complete, as the scheduler does; nothing behind that place was ever given out."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    filter_, shown, start = StopStringFilter(stops), "", 0
    end = min(ends, default=len(text))
    matched = next((stop for stop in stops if text[:end].endswith(stop)), None) if ends else None
    while start < end:
        size = data.draw(st.integers(1, end - start))
        start += size
        piece = text[start - size : start]
        shown += filter_.finish(piece, matched) if start == end else filter_.push(piece)
    expected = text[:end] if matched is None else text[: end - len(matched)]
    assert shown == expected if matched is None else expected.startswith(shown)
    assert not any(stop in shown for stop in stops)


def end_of(ids: list[int], stops: list[str], patterns: list[str]) -> tuple[list[int], FinishReason]:
    """The tokens up to the one with which the scheduler ends the request, and why it ends."""
    text_decoder = TailDecoder(RustDecoder(byte_level()))
    matcher: StopMatcher = StopPatternMatcher(text_decoder, [], stops, patterns) if patterns else StopStringMatcher(
        TokenPieces(text_decoder), stops
    )  # fmt: skip
    for end in range(1, len(ids) + 1):
        matched = matcher.match(np.array(ids[:end], np.int32))
        if matched is not None:
            return ids[:end], FinishReason.stop(matched)
    return ids, FinishReason.length_limit(len(ids))


def text_of_messages(
    ids: list[int], sizes: list[int], reason: FinishReason, stops: list[str], patterns: list[str], flags: int
) -> str:
    detokenizer, text, start, turn = new_detokenizer(), "", 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        piece, start, turn = ids[start : start + size], start + size, turn + 1
        fields: dict[str, Any] = {"finished": {0: reason}} if start >= len(ids) else {}
        if turn == 1:
            fields |= {"stops": {0: stops}, "stop_patterns": {0: patterns}}
        text += detokenizer.process(message({"r": piece}, flags, **fields)).texts[0]
    return text


SOME_PATTERNS = ["b", "bc", "b.d", "a.*c", "[^a]a+", "(ab|bcd)e", r"\bab\b", "(?s)c.*e", "é", "(?m)a$", "[de]$", "d|cde|abcdef"]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("abcde é\n", min_size=1, max_size=5), min_size=1, max_size=12),
    st.lists(st.sampled_from(SOME_PATTERNS), max_size=3),
    st.lists(st.text("abcd é", min_size=1, max_size=4), min_size=1, max_size=2),
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_the_text_is_the_same_however_tokens_are_cut_into_messages(
    pieces: list[str], patterns: list[str], stops: list[str], sizes: list[int]
) -> None:
    ids, reason = end_of([token for piece in pieces for token in ids_of(piece)], stops, patterns)
    whole = text_of_messages(ids, [len(ids)], reason, stops, patterns, SKIP_SPECIAL_TOKENS)
    assert text_of_messages(ids, sizes, reason, stops, patterns, SKIP_SPECIAL_TOKENS) == whole
    assert text_of_messages(ids, [1], reason, stops, patterns, SKIP_SPECIAL_TOKENS) == whole
    everything = byte_level().decode(ids)
    if isinstance(reason.matched, str):
        assert everything.startswith(whole + reason.matched)
        kept = text_of_messages(ids, sizes, reason, stops, patterns, SKIP_SPECIAL_TOKENS | NO_STOP_TRIM)
        assert kept == everything
    else:
        assert whole == everything


@pytest.mark.parametrize("sizes", [[1], [2], [3], [9]])
def test_a_pattern_that_began_in_an_earlier_message_is_cut(sizes: list[int]) -> None:
    ids, reason = end_of([token for letter in "abcde" for token in ids_of(letter)], [], ["c.e"])
    assert reason == FinishReason.stop("cde")
    assert text_of_messages(ids, sizes, reason, [], ["c.e"], SKIP_SPECIAL_TOKENS) == "ab"


@pytest.mark.parametrize("sizes", [[1], [2], [9]])
def test_what_only_looks_like_a_match_because_a_token_is_hidden(sizes: list[int]) -> None:
    """The scheduler sees special tokens, clients do not."""
    end = byte_level().token_to_id("<|end|>")
    ids, reason = end_of([*ids_of("xa"), end, *ids_of("b-"), *ids_of("ab")], [], ["ab"])
    assert reason == FinishReason.stop("ab")
    assert text_of_messages(ids[:-1], sizes, FinishReason.length_limit(9), [], ["ab"], SKIP_SPECIAL_TOKENS).startswith("xab-")


def test_a_pattern_holds_back_so_much_only() -> None:
    held = stop_filter([], ["(?s)<.*>"])
    assert held is not None
    assert held.push("x<") == "x"
    assert "".join(held.push("y" * 100) for _ in range(50)) == "<" + "y" * (5000 - 1024)
    assert held.finish("z", None) == "y" * 1024 + "z"


def test_256_sequences_cost_little() -> None:
    """One token for each of 256 sequences: well below the time of a decode step."""
    detokenizer, rng, times_s = new_detokenizer(), random.Random(1), []
    rids = [f"r{i}" for i in range(256)]
    for _ in range(50):
        out = message({rid: [rng.randrange(300)] for rid in rids})
        started_s = time.perf_counter()
        detokenizer.process(out)
        times_s.append(time.perf_counter() - started_s)
    assert sorted(times_s)[len(times_s) // 2] < 0.02, f"median {sorted(times_s)[25] * 1e3:.2f} ms"
    print(f"256 sequences: median {sorted(times_s)[25] * 1e3:.2f} ms")


# --- what fails, fails alone

POISON = 5_000_000  # not a token


class FailingDecoder(RustDecoder):
    def decode_batch(self, batch: list[list[int]], **options: Any) -> list[str]:
        if any(POISON in tokens for tokens in batch):
            raise OverflowError("no such token")
        return super().decode_batch(batch, **options)

    def token_bytes(self, *, skip_special_tokens: bool) -> None:
        """So that it is asked at all."""


FAILED = FinishReason.abort(
    "The detokenizer failed to decode the request's tokens; the server's log says more.", 500, "InternalServerError"
)


def test_a_row_that_cannot_be_decoded_ends_alone() -> None:
    """The others' text is as if it had not been there, also text that is held back over several tokens."""
    detokenizer = Detokenizer(FailingDecoder(byte_level()))
    text = "naïve 🚀 日本語, hello"
    shown, ended = "", {}
    for i, token in enumerate(ids_of(text)):
        out = detokenizer.process(message({"bad": [POISON if i >= 3 else 7], "good": [token]}))
        shown += out.texts[1]
        ended |= {out.rids[row]: reason for row, reason in out.finished.items()}
        assert out.abandoned == (["bad"] if i == 3 else [])
        assert out.rids == (["bad", "good"] if i <= 3 else ["", "good"]), "what follows the end reaches nobody"
    assert shown == text
    assert ended == {"bad": FAILED}
    assert detokenizer.num_sequences == 1
    last = detokenizer.process(message({"bad": [7], "good": []}, finished=dict.fromkeys((0, 1), FinishReason.length_limit(9))))
    assert (last.rids, last.abandoned) == (["", "good"], [])
    assert detokenizer.num_sequences == 0
    again = detokenizer.process(message({"bad": ids_of("a")}, finished={0: FinishReason.length_limit(1)}))
    assert (again.rids, again.texts) == (["bad"], ["a"]), "the id is free again"


def test_a_failing_last_token_or_prompt_needs_no_abort() -> None:
    detokenizer = Detokenizer(FailingDecoder(byte_level()))
    done = {0: FinishReason.length_limit(1)}
    out = detokenizer.process(message({"r": [POISON]}, finished=done))
    assert (out.finished, out.abandoned) == ({0: FAILED}, [])
    out = detokenizer.process(message({"r": [7], "s": ids_of("b")}, prompt_tails={0: [POISON], 1: [7]}, finished=done))
    assert (out.finished, out.abandoned, out.texts) == ({0: FAILED}, [], ["", "b"])
    assert detokenizer.num_sequences == 1


def test_a_stop_filter_that_fails_ends_its_row() -> None:
    class NoFilter(StopStringFilter):
        def __init__(self, stops: Sequence[str]) -> None:
            raise MemoryError(stops[0])

    class BrokenFilter(StopStringFilter):
        def push(self, text: str) -> str:
            raise KeyError(text)

    detokenizer = new_detokenizer()
    for broken in (NoFilter, BrokenFilter):
        with mock.patch("jaxserve.server.stops.StopStringFilter", broken):
            out = detokenizer.process(message({broken.__name__: ids_of("b"), "good": ids_of("x")}, stops={0: ["s"]}))
        assert (out.texts, out.abandoned) == (["", "x"], [broken.__name__])
        assert out.finished[0] == FAILED


def test_a_message_that_cannot_be_handled_at_all_is_answered_row_by_row() -> None:
    detokenizer = new_detokenizer()
    out = message({"a": [7], "b": [7]})
    out.decode_flags = np.array([1], np.uint8)
    result = detokenizer.process(out)
    assert sorted(result.abandoned) == ["a", "b"]
    assert {reason.status_code for reason in result.finished.values()} == {500}
    assert detokenizer.num_sequences == 0


class Inbox:
    """A Receiver of prepared messages, and a Sender."""

    def __init__(self, *messages: Any) -> None:
        self.messages = list(messages)
        self.sent: list[Any] = []

    def wait(self, timeout_s: float) -> bool:
        assert self.messages, "it should have ended"
        return True

    def receive(self) -> list[Any]:
        return [self.messages.pop(0)]

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_it_ends_with_the_last_scheduler_and_answers_control_requests() -> None:
    box = Inbox(ShutdownReq(), ControlRequest(request_id="c", name="pause_generation"), message({"r": [7]}), ShutdownReq())
    detokenizer, worker = new_detokenizer(), WorkerAddress(DETOKENIZER, 1)
    args, senders = ServerArgs(dp_size=2, detokenizer_worker_num=2), {WorkerAddress(TOKENIZER): box}
    serve(worker, args, detokenizer, box, senders, ControlDesk(detokenizer, worker, box.send))  # type: ignore[arg-type]
    reply, texts = box.sent
    assert (reply.worker, reply.status_code) == (worker, 404)
    assert reply.error == "The detokenizer 1 has no control request 'pause_generation'."
    assert texts.rids == ["r"]


def test_texts_go_to_their_readers_and_profiles_along_the_chain() -> None:
    main, first, second = WorkerAddress(TOKENIZER), WorkerAddress(FRONT, 0), WorkerAddress(FRONT, 1)
    args, worker = ServerArgs(tokenizer_worker_num=2, detokenizer_worker_num=3), WorkerAddress(DETOKENIZER, 1)
    following = WorkerAddress(DETOKENIZER, 2)
    assert receivers_of(worker, args) == {main, first, second, following}
    assert receivers_of(following, args) == {main, first, second}
    inbox = Inbox(
        ProfileBegan(),
        message({"a": [7]}, route=Route(1)),
        message({"b": [7]}, route=Route(1, 0)),
        message({"c": [7]}, route=Route(1, 1)),
        ProfileEnded(folder="f", ended_ns=1, spans={"detokenizer": []}),
        ShutdownReq(),
    )
    boxes = {other: Inbox() for other in receivers_of(worker, args)}
    detokenizer = new_detokenizer()
    serve(worker, args, detokenizer, inbox, boxes, ControlDesk(detokenizer, worker, inbox.send))  # type: ignore[arg-type]
    assert [[out.rids for out in boxes[reader].sent] for reader in (main, first, second)] == [[["a"]], [["b"]], [["c"]]]
    began, ended = boxes[following].sent
    assert isinstance(began, ProfileBegan) and isinstance(ended, ProfileEnded)
    assert {name: len(spans) for name, spans in ended.spans.items()} == {"detokenizer": 0, "detokenizer 1": 3}


def test_readers_may_use_the_same_rid() -> None:
    """The scheduler refuses the second: that is no end for the first."""
    detokenizer, rocket = new_detokenizer(), ids_of("🚀")
    texts = detokenizer.process(message({"r": rocket[:1]}, route=Route(0, 0))).texts
    refused = detokenizer.process(message({"r": []}, route=Route(0, 1), finished={0: FinishReason.abort("in use")}))
    assert refused.texts == [""]
    texts += detokenizer.process(
        message({"r": rocket[1:]}, route=Route(0, 0), finished={0: FinishReason.length_limit(4)})
    ).texts
    assert "".join(texts) == "🚀" and len(rocket) == 2
    assert detokenizer.num_sequences == 0


def test_a_scheduler_that_is_started_again_is_another_for_all_readers() -> None:
    detokenizer = new_detokenizer()
    for front in (None, 0, 1):
        detokenizer.process(message({"r": [7]}, route=Route(0, front)))
    assert detokenizer.num_sequences == 3
    detokenizer.process(message({"r": [7]}, route=Route(0, 1), source=WorkerAddress("scheduler", 0, 1)))
    assert detokenizer.num_sequences == 1
