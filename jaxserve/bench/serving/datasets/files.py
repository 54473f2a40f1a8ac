"""Prompts from files: ShareGPT's JSON, and JSON lines in SGLang's `custom` form or as {"prompt", "output_len"}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.bench.serving.options import CHAT, ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Content, Task

# Shorter prompts and answers are left out, as SGLang does.
_LEAST_TOKENS = 2


def json_lines(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object with the number of its line. Raises ValueError for what is none."""
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object.")
            yield number, value


def sharegpt_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    try:
        talks = json.loads(Path(options.dataset_path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{options.dataset_path} is not JSON ({error}).") from None
    if not isinstance(talks, list):
        raise ValueError(f"{options.dataset_path} is not a list of conversations.")
    return _of_talks([_first_two(talk) for talk in talks if isinstance(talk, dict)], options, tokens, rng)


def custom_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    lines = list(json_lines(options.dataset_path))
    if any("conversations" in line or "conversation" in line for _, line in lines):
        return _of_talks([_first_two(line) for _, line in lines], options, tokens, rng)
    return [_task(number, line, options, tokens) for number, line in lines][: options.num_prompts]


def _first_two(talk: dict[str, Any]) -> tuple[str, str] | None:
    """The first question and its answer; None if there are no two turns of text."""
    turns = talk.get("conversations", talk.get("conversation")) or []
    texts = [turn.get("content", turn.get("value", "")) for turn in turns[:2] if isinstance(turn, dict)]
    match texts:
        case [str(question), str(answer)]:
            return question, answer
    return None


def _of_talks(
    talks: list[tuple[str, str] | None], options: ServingOptions, tokens: Tokens, rng: np.random.Generator
) -> list[Task]:
    tasks: list[Task] = []
    for i in rng.permutation(len(talks)):
        talk = talks[i]
        if len(tasks) == options.num_prompts:
            break
        if talk is None:
            continue
        prompt_len = tokens.prompt_len(talk[0])
        output_len = options.sharegpt_output_len or len(tokens.encode(talk[1]))
        limit = options.sharegpt_context_len
        if min(prompt_len, output_len) < _LEAST_TOKENS or (limit and prompt_len + output_len > limit):
            continue
        tasks.append(Task(turns=[talk[0]], prompt_len=prompt_len, output_len=output_len))
    return tasks


def _task(number: int, line: dict[str, Any], options: ServingOptions, tokens: Tokens) -> Task:
    """{"prompt": text, token ids or messages, "output_len": tokens}; `text`, `input_ids`, `messages` are other names of it."""
    where = f"{options.dataset_path}, line {number}"
    prompt: Content | None = next((line[name] for name in ("prompt", "text", "input_ids", "messages") if name in line), None)
    output_len = line.get("output_len", options.random_output_len)
    if not prompt or not isinstance(prompt, str | list) or not isinstance(output_len, int) or output_len < 1:
        raise ValueError(f"{where}: a line has conversations, or prompt and output_len.")
    if isinstance(prompt, str):
        return Task(turns=[prompt], prompt_len=tokens.prompt_len(prompt), output_len=output_len)
    if "messages" not in line and all(isinstance(one, int) for one in prompt):
        if options.api == CHAT:
            raise ValueError(f"{where}: chat takes no token ids.")
        return Task(turns=[prompt], prompt_len=len(prompt), output_len=output_len)
    texts = [one["content"] for one in prompt if isinstance(one, dict) and isinstance(one.get("content"), str)]
    if options.api != CHAT or len(texts) != len(prompt):
        raise ValueError(f"{where}: messages have texts as content, and need a chat backend.")
    return Task(turns=[prompt], prompt_len=sum(tokens.counts(texts)), output_len=output_len)
