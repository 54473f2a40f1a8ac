"""Sampling options of the commands that generate in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--max-new-tokens", type=click.IntRange(min=1), help="Most tokens; default: what the context has room for."),
    click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy; default: the model's, else 1."),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens of this total probability."),
    click.option("--top-k", type=int, help="Sample from this many likeliest tokens; -1: all."),
    click.option("--min-p", type=float, help="Drop tokens less likely than this share of the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1 makes repeated tokens less likely."),
    click.option("--stop", multiple=True, help="Stop at this text; may be given several times."),
    click.option("--seed", "sampling_seed", type=int, help="Draw the same tokens each time."),
)  # fmt: skip
NAMES = (
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "sampling_seed",
)  # fmt: skip


def sampling_options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Removes the sampling options from `options`; returns those that were given, in /generate's names."""
    taken = {name: options.pop(name) for name in NAMES}
    given = {name: value for name, value in taken.items() if value is not None}
    given["stop"] = list(given["stop"])
    given.setdefault("max_new_tokens", None)
    return given
