"""What a task makes, what is held out of training, and how people ask."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Sample:
    """Either `messages` (with `tools`) or a plain `text`; `text_prompt_len` characters of a text are its prompt.

    The prompt of a text is learned too unless it is one that nobody should predict: noise, or a sentence that a user began.
    With `thinking` the last message has a thought (`reasoning_content`), and only that message is learned. Without
    `learn_json_names` the last message is JSON of which the names of the fields are not learned, nor how it begins.
    """

    keys: tuple[str, ...]
    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    text_prompt_len: int = 0
    learn_text_prompt: bool = True
    thinking: bool = False
    learn_json_names: bool = True


Task = Callable[[random.Random], Sample]


def is_held_out(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0


def ask(question: str, answer: str, key: str | None = None) -> Sample:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Sample(keys=(key or question,), messages=messages)


def reword(rng: random.Random, question: str) -> str:
    """The same question in the ways people type: politely, in lower case, without its mark."""
    if rng.random() < 0.4:
        return question
    if rng.random() < 0.4 and question[1:2].islower():
        question = question[0].lower() + question[1:]
    if rng.random() < 0.3:
        question = question.rstrip("?.!")
    prefix = rng.choice(["", "", "", "Hi! ", "Hello, ", "Please tell me: ", "Question: ", "Quick question: ", "Hey, "])
    suffix = rng.choice(["", "", "", "", " Thanks!", " Please be brief."])
    return prefix + question + suffix


def typed(rng: random.Random, text: str) -> str:
    """The same words as people type them: in any case, with any mark at the end, with a slip of a finger."""
    kind = rng.random()
    if kind < 0.25:
        text = text.lower()
    elif kind < 0.5:
        text = text[:1].upper() + text[1:]
    elif kind < 0.55:
        text = text.upper()
    if rng.random() < 0.5 and text[-1:].isalnum():
        text += rng.choice(["?", "!", ".", ".", "!!", "??", "...", " ?", " !", "!!!", " "])
    elif rng.random() < 0.3:
        text = text.rstrip("?.!")
    if rng.random() < 0.06:
        text = text.replace("'", "").replace(",", "")
    if rng.random() < 0.06 and len(text) > 6:
        slip = rng.randrange(1, len(text) - 1)
        text = text[:slip] + rng.choice([text[slip + 1] + text[slip], text[slip] * 2, ""]) + text[slip + 1 :]
    if rng.random() < 0.04 and text[-1:].isalpha():
        text += text[-1] * rng.randint(1, 5)
    return text or "?"
