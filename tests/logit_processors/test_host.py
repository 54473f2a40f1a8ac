"""Users' code in its process: what it may see and change, and that nothing it does reaches further than its own request."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import types
from collections.abc import Iterator

import dill
import numpy as np
import pytest
from sent import as_text, sent
from user_code import ForceToken, NotCallable

from jaxserve.logit_processors import CustomLogitProcessor, ProcessorError, ProcessorHost, sglang_classes
from jaxserve.logit_processors.names import SGLANG_MODULE, name_of, user_code
from jaxserve.types import UserProcessor

PROMPT, OUTPUTS = np.array([7, 8], np.int32), np.array([3, 4, 5], np.int32)


@pytest.fixture(scope="module")
def host() -> Iterator[ProcessorHost]:
    host = ProcessorHost(timeout_s=1.0)
    yield host
    host.close()


def logits(lines: int = 1) -> np.ndarray:
    return np.random.default_rng(lines).normal(size=(lines, 50)).astype(np.float32)


def apply(host: ProcessorHost, processor: UserProcessor, lines: int = 1) -> np.ndarray:
    return host.apply(processor, "me", PROMPT, OUTPUTS, logits(lines))


def test_what_comes_back_is_what_the_code_made(host: ProcessorHost) -> None:
    changed = apply(host, sent("ForceToken", token_id=9))
    assert changed.shape == (1, 50) and changed[0].argmax() == 9 and np.isneginf(np.delete(changed[0], 9)).all()
    np.testing.assert_array_equal(apply(host, sent("Unchanged"), 3), logits(3))


def test_each_line_has_seen_its_drafts(host: ProcessorHost) -> None:
    """Of the three outputs the last two are drafts."""
    expected = [(3 * 3 + 1), (4 * 3 + 2), (5 * 3 + 3)]
    assert apply(host, sent("Echo"), 3).argmax(axis=1).tolist() == expected


def test_to_str_and_back() -> None:
    assert isinstance(CustomLogitProcessor.from_str(ForceToken.to_str()), ForceToken)
    assert user_code(ForceToken.to_str()) == dill.dumps(ForceToken)


@pytest.mark.parametrize(
    ("name", "said", "restarts"),
    [
        ("Raises", "raised RuntimeError: no such luck", False),
        ("Loops", "took too long: a call may take 1 s (--custom-logit-processor-timeout-s)", True),
        ("LoopsWhenMade", "took too long: loading it may take 1 s", True),
        ("Exits", "ended the process", True),
        ("ExitsPolitely", "raised SystemExit: 3", False),
        ("Allocates", "MemoryError", False),
        ("Babbles", "ended the process", True),
        ("HalfPrecision", "must return float32 [1, 50] (rows, vocabulary), got float64 [1, 50]", False),
        ("OneLine", "got float32 [50]", False),
        ("AList", "must return a NumPy array, got list", False),
        ("Nan", "NaN or infinite", False),
    ],
)
def test_what_goes_wrong_is_said_and_the_next_call_is_served(host: ProcessorHost, name: str, said: str, restarts: bool) -> None:
    good, started = sent("ForceToken", token_id=1), host.num_started
    apply(host, good)
    with pytest.raises(ProcessorError) as raised:
        apply(host, sent(name))
    assert said in str(raised.value) and str(raised.value).startswith("custom_logit_processor ")
    assert raised.value.ended_process == restarts and host.num_started == started + restarts
    assert apply(host, good)[0].argmax() == 1


def test_printing_changes_nothing(host: ProcessorHost, capfd: pytest.CaptureFixture[str]) -> None:
    np.testing.assert_array_equal(apply(host, sent("Prints")), logits())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "code",
    [
        b"",
        b"no pickle",
        b"\x80\x04N.",
        dill.dumps(3),
        dill.dumps(ForceToken)[:-20],
        dill.dumps(NotCallable),
        b"cno_module\nX\n.",
    ],
    ids=repr,
)
def test_code_that_cannot_be_loaded(host: ProcessorHost, code: bytes) -> None:
    with pytest.raises(ProcessorError, match=r"^custom_logit_processor "):
        apply(host, UserProcessor(code, b"{}"))
    assert apply(host, sent("ForceToken", token_id=1))[0].argmax() == 1


def test_a_process_that_dies_meanwhile_is_replaced(host: ProcessorHost) -> None:
    apply(host, sent("Unchanged"))
    os.kill(host._child.pid, signal.SIGKILL)
    host._child.wait()
    assert apply(host, sent("ForceToken", token_id=2))[0].argmax() == 2


def test_many_codes_do_not_pile_up() -> None:
    host = ProcessorHost(timeout_s=5.0)
    try:
        processor = sent("ForceToken", token_id=4)
        for number in range(70):
            different = UserProcessor(processor.code + bytes([number]), processor.params)  # nobody reads behind a pickle's end
            assert apply(host, different)[0].argmax() == 4
        assert host.num_started == 2
    finally:
        host.close()


def test_nothing_is_left_behind() -> None:
    host = ProcessorHost(timeout_s=1.0)
    pid = host._child.pid
    host.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- SGLang's strings


@pytest.fixture
def their_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """SGLang's module as its clients have it."""
    parts = SGLANG_MODULE.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    module = types.ModuleType(SGLANG_MODULE)
    for end in range(1, len(parts)):  # as importing leaves them
        whole = module if end == len(parts) - 1 else sys.modules[".".join(parts[: end + 1])]
        setattr(sys.modules[".".join(parts[:end])], parts[end], whole)
    for name in sglang_classes.__all__:
        ours = getattr(sglang_classes, name)
        setattr(module, name, type(name, ours.__mro__[1:2], {"__module__": SGLANG_MODULE, "__call__": ours.__call__}))
    monkeypatch.setitem(sys.modules, SGLANG_MODULE, module)
    return module


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("DisallowedTokensLogitsProcessor", "disallowed_tokens"),
        ("Qwen3ThinkingBudgetLogitProcessor", "thinking_budget"),
        ("DeepseekOCRNoRepeatNGramLogitProcessor", "no_repeat_ngram"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_classes_of_sglang_are_names(their_module: types.ModuleType, name: str, expected: str, protocol: int) -> None:
    text = json.dumps({"callable": dill.dumps(getattr(their_module, name), protocol=protocol).hex()})
    assert name_of(text) == expected == name_of(name)


def test_code_that_derives_from_a_class_of_sglang(host: ProcessorHost, their_module: types.ModuleType) -> None:
    fields = {"THINKING_START_TOKEN_ID": 8, "THINKING_END_TOKEN_ID": 11, "NEW_LINE_TOKEN_ID": 12, "__module__": "__main__"}
    kind = type("Mine", (their_module.ThinkingBudgetLogitProcessor,), fields)
    text = json.dumps({"callable": dill.dumps(kind, byref=False, recurse=True).hex()})
    assert name_of(text) is None
    for budget, expected in ((3, 12), (4, int(logits().argmax()))):
        params = json.dumps({"thinking_budget": budget}).encode()
        assert apply(host, UserProcessor(user_code(text), params))[0].argmax() == expected


def test_what_looks_like_a_name_and_calls_something_is_code() -> None:
    pickle = b"cos\nsystem\n(S'true'\ntR."
    assert name_of(json.dumps({"callable": pickle.hex()})) is None
    assert name_of(as_text(ForceToken)) is None


def test_a_looping_call_takes_its_time_and_no_more(host: ProcessorHost) -> None:
    apply(host, sent("Unchanged"))
    started_s = time.monotonic()
    with pytest.raises(ProcessorError):
        apply(host, sent("Loops"))
    assert time.monotonic() - started_s < 5
