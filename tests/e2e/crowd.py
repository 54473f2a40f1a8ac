"""A crowd of clients of a live server, and what each must be answered."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import regex
from live_server import LiveServer
from parity import Oracle
from tokenizers import Tokenizer

CROWD = 64
LEN = 12

# With the pattern of their texts, which all end soon. Nothing is forced for longer than a token: for the pattern all ways to
# write it would be right, for llguidance one.
WORD = "[a-h]{4,9}[0-9]{2,6}"
GRAMMARS: list[tuple[dict[str, str], str]] = [
    ({"regex": f"({WORD} )?{WORD}"}, f"({WORD} )?{WORD}"),
    ({"json_schema": json.dumps({"type": "string", "pattern": f"^{WORD}$"})}, f'"{WORD}"'),
]


def prompts(oracle: Oracle, seed: int) -> list[list[int]]:
    """A crowd's, half of them behind a few shared beginnings."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(3, oracle.config.vocab_size, count).tolist()

    shared = [tokens(70) for _ in range(4)]
    return [[*(shared[i % 4] if i % 2 else []), *tokens(int(rng.integers(1, 60)))] for i in range(CROWD)]


def ask(server: LiveServer, index: int, prompt: list[int]) -> list[int]:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": LEN, "ignore_eos": True}}
    if index % 3:
        output: list[int] = server.generate(**body)["output_ids"]
        return output
    *_, last = server.stream("/generate", body)
    return list(last["output_ids"])


def check(oracle: Oracle, prompt: list[int], answer: list[int]) -> None:
    assert len(answer) == LEN
    best = oracle.logprobs([*prompt, *answer]).argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert answer == best


def check_crowd(server: LiveServer, oracle: Oracle, seed: int) -> None:
    """All at once."""
    crowd = prompts(oracle, seed)
    with concurrent.futures.ThreadPoolExecutor(CROWD) as pool:
        answers = list(pool.map(ask, itertools.repeat(server), range(CROWD), crowd))
    for prompt, answer in zip(crowd, answers, strict=True):
        check(oracle, prompt, answer)


def check_grammars(server: LiveServer, oracle: Oracle, **where: Any) -> None:
    """In one batch greedy requests, those that draw, and those without a grammar."""
    a_letter = 68  # at the end of each prompt: half a character there would be part of the text
    crowd = [[*prompt, a_letter] for prompt in prompts(oracle, 0)[:18]]
    kinds = [*itertools.product(GRAMMARS, (0.0, 1.0)), None]  # of the i-th, kinds[i % 5]
    params = [
        {"temperature": 0.0, "max_new_tokens": LEN, "ignore_eos": True}
        if kind is None
        else {"temperature": kind[1], "max_new_tokens": 60, **kind[0][0]}
        for kind, _ in zip(itertools.cycle(kinds), crowd, strict=False)
    ]
    replies = server.generate(input_ids=crowd, sampling_params=params, **where)
    for kind, prompt, reply in zip(itertools.cycle(kinds), crowd, replies, strict=False):
        if kind is None:
            check(oracle, prompt, reply["output_ids"])
            continue
        (_, pattern), temperature = kind
        assert reply["meta_info"]["finish_reason"]["type"] == "stop", reply
        assert regex.fullmatch(pattern, reply["text"]), reply
        assert temperature or reply["text"] == greedy_text(oracle, prompt, pattern)


def greedy_text(oracle: Oracle, prompt: list[int], pattern: str) -> str:
    """Token by token the one that Transformers has for the likeliest of those with which the text can still become a match."""
    tokenizer = Tokenizer.from_file(str(Path(oracle.model.name_or_path) / "tokenizer.json"))
    pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
    eos, ids, text = oracle.config.eos_token_id, list(prompt), ""
    while True:
        fits = [token for token, piece in enumerate(pieces) if piece and regex.fullmatch(pattern, text + piece, partial=True)]
        if regex.fullmatch(pattern, text):
            fits.append(eos)
        best = fits[int(oracle.logprobs(ids)[-1, fits].argmax())]
        if best == eos:
            return text
        ids.append(best)
        text += pieces[best]
