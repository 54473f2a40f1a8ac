"""Every reasoning format: thinking and answer part where the tags are, however the message is cut."""

from __future__ import annotations

import time

import pytest
from parser_messages import TOOLS, cuts, in_order, parse
from spellings import SPELLINGS

from jaxserve.parsers.message import MessageFormat, message_format
from jaxserve.parsers.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from jaxserve.parsers.reasoning import REASONING_FORMATS
from jaxserve.parsers.reasoning.tagged import TaggedFormat
from jaxserve.parsers.tools import TOOL_FORMATS

TAGGED = {name: format_ for name, format_ in REASONING_FORMATS.items() if isinstance(format_, TaggedFormat)}
THOUGHT = 'Hm, "so" <b> {x} </thin< 東京😀\n\nthen'
ANSWER = "An answer,\n  with a < b and </"


def read(name: str, parts: list[str], *, is_open: bool) -> list[Piece]:
    return in_order(parse(REASONING_FORMATS[name].parser(is_open=is_open), parts))


@pytest.mark.parametrize("name", TAGGED)
def test_thinking_and_answer(name: str) -> None:
    tags = TAGGED[name]
    expected = [Reasoning(THOUGHT), Content(ANSWER)]
    for text, is_open in (
        (f"{tags.begin}\n{THOUGHT}\n{tags.end}\n\n{ANSWER}", False),
        (f"{tags.begin}{THOUGHT}{tags.end}{ANSWER}", True),
        (f"\n{THOUGHT}\n{tags.end}\n\n{ANSWER}", True),
    ):
        for parts in cuts(text):
            assert read(name, parts, is_open=is_open) == expected


@pytest.mark.parametrize("name", TAGGED)
def test_what_is_not_both(name: str) -> None:
    tags = TAGGED[name]
    for text, is_open, expected in (
        ("", False, []),
        ("", True, []),
        (ANSWER, False, [Content(ANSWER)]),
        (f" {ANSWER}\n", False, [Content(f" {ANSWER}\n")]),
        (f"The tag {tags.begin} begins it.", False, [Content(f"The tag {tags.begin} begins it.")]),
        (THOUGHT, True, [Reasoning(THOUGHT)]),
        (f"{tags.end}{ANSWER}", True, [Content(ANSWER)]),
        (f"{tags.begin}\n\n{tags.end}\n\n{ANSWER}", False, [Content(ANSWER)]),
        (f"{THOUGHT}{tags.end[:-1]}", True, [Reasoning(f"{THOUGHT}{tags.end[:-1]}")]),
        (f"{tags.begin[:-1]}", False, [Content(tags.begin[:-1])]),
        (f"{THOUGHT}{tags.end}{ANSWER}{tags.end}", True, [Reasoning(THOUGHT), Content(ANSWER + tags.end)]),
    ):
        for parts in cuts(text):
            assert read(name, parts, is_open=is_open) == expected


@pytest.mark.parametrize("name", [name for name, tags in TAGGED.items() if tags.call_tag])
def test_a_call_ends_the_thinking(name: str) -> None:
    tag = TAGGED[name].call_tag
    for parts in cuts(f"Let me look. {tag}rest"):
        assert read(name, parts, is_open=True) == [Reasoning("Let me look."), Content(f"{tag}rest")]


@pytest.mark.parametrize(
    ("name", "tail", "is_open"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3-thinking", "<|im_start|>assistant\n", True),
        ("deepseek-r1", "<｜Assistant｜>", True),
        ("deepseek-r1", "<｜Assistant｜><think>\n", True),
        ("deepseek-r1", "<｜Assistant｜><think>\n\n</think>\n\n", False),
        ("deepseek-v3", "<｜Assistant｜></think>", False),
        ("deepseek-v3", "<｜Assistant｜><think>", True),
        ("qwen3", "<|im_start|>assistant\n<think>\nHm, I", True),
        ("qwen3", "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nThe", False),
        ("qwen3-thinking", "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nThe", False),
        ("deepseek-r1", "</think>Hi.<｜end▁of▁sentence｜><｜User｜>And?<｜Assistant｜>", True),
        ("minimax", "</think>\nHi.[e~[\n]~b]user\nAnd?[e~[\n]~b]ai\n", True),
        ("mistral", "[SYSTEM_PROMPT][THINK]so[/THINK][/SYSTEM_PROMPT][INST]And?[/INST]", False),
        ("mistral", "[INST]And?[/INST][THINK]Hm", True),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|><think>", True),
        ("glm45", "<|user|>\nwhat does <think> mean?<|assistant|>", False),
        ("gemma4", "<start_of_turn>model\n", False),
        ("qwen3", "what does <think> mean?<|im_end|>\n<|im_start|>assistant\n", False),
        ("gemma4", "<start_of_turn>model\n<|channel>thought\n", True),
        ("mistral", "[/INST]", False),
        ("gpt-oss", "<|start|>assistant", True),
        ("gpt-oss", "<|start|>assistant<|channel|>final<|message|>", False),
    ],
)
def test_the_prompt_says_whether_thinking_has_begun(name: str, tail: str, is_open: bool) -> None:
    assert REASONING_FORMATS[name].is_open(tail) == is_open


ANALYSIS = "<|channel|>analysis<|message|>Think.<|end|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"key": "k"}<|call|>'
HARMONY: list[tuple[str, list[Piece]]] = [
    (f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hi <b>.<|return|>", [Reasoning("Think."), Content("Hi <b>.")]),
    (f"{ANALYSIS}{CALL}", [Reasoning("Think."), CallBegin(0, "get"), CallArguments(0, '{"key": "k"}')]),
    (
        f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{CALL}",
        [Reasoning("Think."), Content("I look."), CallBegin(0, "get"), CallArguments(0, '{"key": "k"}')],
    ),
    (
        '<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{"key": "k"}<|call|>',
        [CallBegin(0, "get"), CallArguments(0, '{"key": "k"}')],
    ),
    (CALL.replace("get", "other"), [Content(CALL.replace("get", "other"))]),
    ("<|channel|>final<|message|>Cut off", [Content("Cut off")]),
    ("<|channel|>analysis<|message|>Cut off", [Reasoning("Cut off")]),
    ("<|channel|>analysis", []),
    ("plain text", [Content("plain text")]),
    ("<|channel|>" + "x" * 600, [Content("<|channel|>" + "x" * 600)]),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_harmony(text: str, expected: list[Piece]) -> None:
    for parts in cuts(text):
        parser = message_format("gpt-oss", "gpt-oss").parser(TOOLS, is_open=True)
        assert in_order(parse(parser, parts)) == expected


def test_thinking_then_calls_in_every_pair() -> None:
    for tags in {*TAGGED.values()}:
        for name, spelling in SPELLINGS.items():
            text = f"{tags.begin}\nHm.\n{tags.end}\n\n{spelling([('get', {'key': 'k'}), ('now', {})])}"
            tools = TOOL_FORMATS[name.partition("/")[0]]
            for parts in ([text], list(text)):
                reasoning, *calls = in_order(parse(MessageFormat(tags, tools).parser(TOOLS), parts))
                assert reasoning == Reasoning("Hm.")
                assert [piece.name for piece in calls if isinstance(piece, CallBegin)] == ["get", "now"]
                assert not any(isinstance(piece, Content) for piece in calls)


def test_parts_may_be_left_out() -> None:
    text = f"<think>Hm.</think>{SPELLINGS['qwen25']([('now', {})])}"
    format_ = message_format("qwen3", "qwen25")
    assert parse(format_.parser(TOOLS, separate_reasoning=False), [text])[0] == Content("<think>Hm.</think>")
    assert in_order(parse(format_.parser(), [text]))[1] == Content(text.removeprefix("<think>Hm.</think>"))
    assert parse(message_format(None, None).parser(TOOLS), [text, ""]) == [Content(text)]


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_time_is_linear(name: str) -> None:
    format_ = REASONING_FORMATS[name]
    for text in (
        f"{format_.begin}{'Hm, so. ' * 125_000}",
        str(format_.begin) * 60_000,
        "</thin" * 150_000,
        "<|channel|>" * 90_000,
    ):
        start = time.process_time()
        parse(format_.parser(is_open=True), [text[at : at + 10] for at in range(0, len(text), 10)])
        assert time.process_time() - start < 8
