"""Tokens of thinking are counted alike however the tokens come, with tags of one token and of many."""

from __future__ import annotations

from typing import Any

import pytest
from fake_service import FakeService, FakeTokenizer

from jaxserve.server.thinking_tokens import Tag, ThinkingTokens

TAGS = {"<think>": 500, "</think>": 501}


class TagTokenizer(FakeTokenizer):
    """The tags are tokens of their own."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [TAGS[text]] if text in TAGS else super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        tags = {token_id: tag for tag, token_id in TAGS.items()}
        return "".join(tags.get(token_id, chr(token_id)) for token_id in ids)


def service_of(tokenizer: FakeTokenizer) -> Any:
    service = FakeService()
    service.tokenizer = tokenizer
    return service


def counted(service: Any, parts: list[list[int]], *, is_open: bool) -> int:
    counter = ThinkingTokens(None if is_open else Tag.of("<think>", service), Tag.of("</think>", service))
    for part in parts:
        counter.add(part)
    return counter.count


def cuts(ids: list[int]) -> list[list[list[int]]]:
    every = [[ids[:i], ids[i:]] for i in range(len(ids) + 1)]
    return [*every, *([ids[i : i + size] for i in range(0, len(ids), size)] for size in (1, 2, 3))]


def ids_of(text: str, tokenizer: FakeTokenizer) -> list[int]:
    ids: list[int] = []
    while text:
        tag = next((tag for tag in TAGS if text.startswith(tag)), text[0])
        ids, text = ids + tokenizer.encode(tag, add_special_tokens=False), text[len(tag) :]
    return ids


@pytest.mark.parametrize("tokenizer", [FakeTokenizer(), TagTokenizer()], ids=["characters", "tags"])
@pytest.mark.parametrize(
    ("text", "is_open", "thinking"),
    [
        ("abc</think>de", True, "abc</think>"),
        ("abc", True, "abc"),
        ("</think>de</think>", True, "</think>"),
        ("<think>ab</think>c", False, "<think>ab</think>"),
        ("\n<think>ab", False, "\n<think>ab"),
        ("ab</think>c", False, ""),
        ("abc", False, ""),
        ("a" * 100 + "<think>b</think>", False, ""),
        ("So <think>b</think>", False, ""),
        ("<thin", False, ""),
        ("   <think>a</think><think>", False, "   <think>a</think>"),
        ("</thin</think></think>", True, "</thin</think>"),
    ],
)
def test_the_count(tokenizer: FakeTokenizer, text: str, is_open: bool, thinking: str) -> None:
    service, ids = service_of(tokenizer), ids_of(text, tokenizer)
    for parts in cuts(ids):
        assert counted(service, parts, is_open=is_open) == len(ids_of(thinking, tokenizer)), parts


def test_a_tag_amid_many_tokens_takes_few_looks() -> None:
    service = service_of(FakeTokenizer())
    looks = []
    tag = Tag("</think>", None, lambda ids, skip: looks.append(len(ids)) or "".join(map(chr, ids)))
    counter = ThinkingTokens(None, tag)
    counter.add([ord(char) for char in "x" * 5000 + "</think>" + "y" * 5000])
    assert counter.count == 5008
    assert len(looks) < 20
    looks.clear()
    silent = ThinkingTokens(Tag("<think>", None, tag.decode), tag)
    for char in "no thoughts" * 100:
        silent.add([ord(char)])
    assert (silent.count, len(looks)) == (0, 1)
    assert service.requests == []
