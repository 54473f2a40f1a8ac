"""Where prompts come from: one module per kind, each `(options, tokens, rng) -> tasks`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxserve.bench.serving.datasets.files import custom_tasks, sharegpt_tasks
from jaxserve.bench.serving.datasets.random import multi_turn_tasks, random_tasks
from jaxserve.bench.serving.datasets.schema import schema_tasks
from jaxserve.bench.serving.datasets.shared_prefix import shared_prefix_tasks
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Task

_MAKERS: dict[str, Callable[[ServingOptions, Tokens, np.random.Generator], list[Task]]] = {
    "random": random_tasks, "random-ids": random_tasks, "sharegpt": sharegpt_tasks, "custom": custom_tasks,
    "generated-shared-prefix": shared_prefix_tasks, "multi-turn": multi_turn_tasks, "json-schema": schema_tasks,
}  # fmt: skip


def make_tasks(options: ServingOptions, tokens: Tokens) -> list[Task]:
    """What to send, when each arrives and which adapter answers; the same for the same seed. Raises ValueError with a sentence
    for the user."""
    tasks = _MAKERS[options.dataset_name](options, tokens, np.random.default_rng(options.seed))
    if not tasks:
        raise ValueError(f"{options.dataset_path} holds no prompt that could be sent.")
    # Their own generator: another dataset or length leaves arrivals as they were.
    for task, arrival_s in zip(tasks, arrivals(options, len(tasks), np.random.default_rng(options.seed)), strict=True):
        task.arrival_s = arrival_s
    if options.lora_name:
        for task, adapter in zip(tasks, np.random.default_rng(options.seed).choice(options.lora_name, len(tasks)), strict=True):
            task.lora_name = str(adapter)
    return tasks


def arrivals(options: ServingOptions, num: int, rng: np.random.Generator) -> list[float]:
    """Seconds after the start at which each request arrives: at random, at the rate of that moment."""
    progress = np.arange(num) / max(num - 1, 1)
    if options.ramp_up_strategy is None:
        rates = np.full(num, options.request_rate)
    else:
        start, end = options.ramp_up_start_rps or 1.0, options.ramp_up_end_rps or 1.0
        rates = start + (end - start) * progress if options.ramp_up_strategy == "linear" else start * (end / start) ** progress
    gaps = rng.exponential(1.0, size=num) / rates
    times: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
    return times
