"""Groups of prompts that begin with the same system prompt: what a prefix cache is for."""

from __future__ import annotations

import numpy as np

from jaxserve.bench.serving.datasets.random import random_lens, text_source
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Content, Task


def shared_prefix_tasks(options: ServingOptions, tokens: Tokens, rng: np.random.Generator) -> list[Task]:
    """--gsp-num-groups times --gsp-prompts-per-group tasks, shuffled unless --gsp-ordered."""
    source = text_source(tokens, rng)
    groups, per_group, num_turns = options.gsp_num_groups, options.gsp_prompts_per_group, options.gsp_num_turns
    ratio = options.gsp_range_ratio
    prefix_lens = random_lens(options.gsp_system_prompt_len, ratio, groups, rng)
    question_lens = random_lens(options.gsp_question_len, ratio, groups * per_group * num_turns, rng)
    output_lens = random_lens(options.gsp_output_len, ratio, groups * per_group, rng)
    prefixes = [str(source(length)[0]) for length in prefix_lens]
    tasks = []
    for i, output_len in enumerate(output_lens):
        questions = [str(source(length)[0]) for length in question_lens[i * num_turns : (i + 1) * num_turns]]
        first = f"{prefixes[i // per_group]}\n\n{questions[0]}"
        turns: list[Content] = [first, *questions[1:]]
        prompt_len = tokens.prompt_len(first)
        if options.tokenize_prompt:
            ids = tokens.encode(first)
            turns, prompt_len = [ids], len(ids)
        tasks.append(Task(turns=turns, prompt_len=prompt_len, output_len=output_len))
    order = range(len(tasks)) if options.gsp_ordered else rng.permutation(len(tasks))
    return [tasks[int(i)] for i in order]
