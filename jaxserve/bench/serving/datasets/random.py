"""Prompts of random text or random token ids, with lengths in tokens that are asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxserve.bench.serving.datasets.text import text
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Content, Task

# Of the text that prompts are cut from.
_MADE_UP_WORDS = 50_000
# Behind the length that is asked for, should the text have fewer tokens than the ids it was made of.
_SPARE_TOKENS = 32

# (length in tokens) -> a prompt and how many tokens it has.
Source = Callable[[int], tuple[Content, int]]


def random_lens(full_len: int, range_ratio: float, num: int, rng: np.random.Generator) -> list[int]:
    """Uniform between `range_ratio` of the full length, at least 1, and all of it."""
    lens: list[int] = rng.integers(max(int(full_len * range_ratio), 1), full_len + 1, size=num).tolist()
    return lens


def text_source(tokens: Tokens, rng: np.random.Generator, path: str = "", *, as_ids: bool = False) -> Source:
    """Stretches of the text in a file, or of made-up text. Each begins elsewhere, so that no prefix is shared by chance."""
    ids_of_text = tokens.encode(_read(path) if path else text(rng, _MADE_UP_WORDS))
    if not ids_of_text:
        raise ValueError(f"--dataset-path {path} has no text.")
    begins = itertools.cycle(rng.permutation(len(ids_of_text)).tolist())

    def make(length: int) -> tuple[Content, int]:
        begin, num = next(begins), length + _SPARE_TOKENS
        repeats = 1 + (begin + num) // len(ids_of_text)
        ids = (ids_of_text * repeats)[begin : begin + num]
        return (ids[:length], length) if as_ids else tokens.text_of_len(ids, length)

    return make


def ids_source(tokens: Tokens, rng: np.random.Generator, *, as_ids: bool) -> Source:
    """Any tokens but special ones. As text they may be read as other tokens; the length is what that text has."""

    def make(length: int) -> tuple[Content, int]:
        ids = [tokens.plain_ids[i] for i in rng.integers(len(tokens.plain_ids), size=length + _SPARE_TOKENS)]
        return (ids[:length], length) if as_ids else tokens.text_of_len(ids, length)

    return make


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--dataset-path {path} is no text.") from None


def random_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    as_ids = options.tokenize_prompt
    if options.dataset_name == "random-ids":
        source = ids_source(tokens, rng, as_ids=as_ids)
    else:
        source = text_source(tokens, rng, options.dataset_path, as_ids=as_ids)
    return tasks_of(source, options, rng, num_turns=1)


def multi_turn_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    return tasks_of(text_source(tokens, rng, options.dataset_path), options, rng, num_turns=options.num_turns)


def tasks_of(source: Source, options: ServingOptions, rng: np.random.Generator, *, num_turns: int) -> list[Task]:
    num, ratio = options.num_prompts, options.random_range_ratio
    input_lens = random_lens(options.random_input_len, ratio, num * num_turns, rng)
    output_lens = random_lens(options.random_output_len, ratio, num, rng)
    tasks = []
    for i, output_len in enumerate(output_lens):
        turns = [source(length) for length in input_lens[i * num_turns : (i + 1) * num_turns]]
        tasks.append(Task(turns=[content for content, _ in turns], prompt_len=turns[0][1], output_len=output_len))
    return tasks
