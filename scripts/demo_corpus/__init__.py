"""Generates the text that the demo model is trained and evaluated on.

A *task* is a function from a random generator to one `Sample`: a conversation whose assistant turns are to be learned,
or a plain text. Every sample has a key (its question, or the sum it asks for), and `is_held_out(key)` keeps one key in
twenty away from training, so that the evaluation asks what the model has never seen. Knows nothing of tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from demo_corpus import dialogues, newcomers, questions, schemas, thinking, words
from demo_corpus.sample import HELD_OUT_ONE_IN, Message, Sample, Task, is_held_out

__all__ = ["FACTS_STEP", "MIX", "Message", "Sample", "held_out_samples", "is_held_out", "training_samples"]

TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (
        questions.concept,
        questions.question,
        questions.capital,
        questions.word_fact,
        questions.story,
        questions.addition,
        questions.subtraction,
        questions.asked_sum,
        questions.multiplication,
        questions.sums_text,
        questions.counting,
        questions.compare,
        questions.large_numbers,
        questions.count_to,
        words.copying,
        words.reversing,
        words.picking,
        words.letters,
        words.json_extraction,
        words.json_person,
        words.json_list,
        schemas.json_schema,
        schemas.json_unshown,
        dialogues.memory,
        dialogues.conversation,
        dialogues.tool_call,
        dialogues.parallel_tool_calls,
        dialogues.tool_answer,
        dialogues.tool_conversation,
        dialogues.unused_tools,
        questions.plain_text,
        words.repeated_text,
        newcomers.greeting,
        newcomers.small_talk,
        newcomers.supported,
        newcomers.beyond,
        newcomers.paste,
        newcomers.long_paste,
        newcomers.noise,
        newcomers.foreign,
        newcomers.completion,
        newcomers.first_sum,
        dialogues.long_conversation,
        dialogues.raw_question,
        thinking.thought_sum,
        thinking.thought_compare,
        thinking.thought_letters,
        thinking.thought_picking,
        thinking.thought_schema,
        thinking.thought_tool,
        thinking.thought_kind,
        thinking.thought_conversation,
        thinking.thought_told,
    )
}

# How often each task is drawn, relative to the others.
MIX: dict[str, float] = {
    "concept": 8,
    "question": 8,
    "capital": 3,
    "word_fact": 5,
    "story": 2,
    "addition": 30,
    "subtraction": 22,
    "asked_sum": 16,
    "multiplication": 4,
    "sums_text": 5,
    "counting": 6,
    "compare": 3,
    "copying": 12,
    "reversing": 4,
    "picking": 3,
    "letters": 1,
    "json_extraction": 10,
    "json_person": 2,
    "json_list": 2,
    "memory": 2,
    "conversation": 5,
    "tool_call": 4,
    "parallel_tool_calls": 1,
    "tool_answer": 1,
    "tool_conversation": 3,
    "unused_tools": 1,
    "plain_text": 2,
    "greeting": 7,
    "small_talk": 26,
    "supported": 4,
    "large_numbers": 3,
    "count_to": 2,
    "beyond": 22,
    "paste": 4,
    "noise": 6,
    "foreign": 5,
    "completion": 8,
    "first_sum": 10,
    "raw_question": 4,
    "json_schema": 60,
    "thought_sum": 18,
    "thought_compare": 10,
    "thought_letters": 8,
    "thought_picking": 12,
    "thought_schema": 8,
    "thought_tool": 7,
    "thought_kind": 9,
    "thought_conversation": 2,
    "thought_told": 2,
}
# Also with answers that only a grammar makes whole, for which the evaluation does not ask.
EVERYTHING = MIX | {"json_unshown": 60}
# Rows as long as the context of the model.
LONG_MIX: dict[str, float] = {"long_paste": 1, "long_conversation": 3}


@dataclass(frozen=True)
class Stage:
    first_step: int
    weights: dict[str, float]


# Facts are learned at once, looking back at the prompt comes late: so that is practised alone for a while, and then
# makes the rest easier. Conversations with tools are long and teach few tokens each, so they become rarer after that. At
# the end what is still weak comes more often, sums above all.
FEWER_TOOLS = {"tool_call": 2.5, "parallel_tool_calls": 1.5, "tool_answer": 0.5, "tool_conversation": 1.2, "unused_tools": 1}
STILL_WEAK = {"question": 14, "concept": 11, "supported": 8, "word_fact": 8, "sums_text": 4, "counting": 8, "compare": 2,
              "picking": 2, "tool_call": 4, "parallel_tool_calls": 2, "addition": 20, "subtraction": 16, "small_talk": 26,
              "beyond": 20}  # fmt: skip
# What trained weights read when some facts have changed: those often, and all else so that nothing is lost.
NEW_FACTS = {"question": 130, "supported": 60, "raw_question": 30, "completion": 20, "conversation": 15}
FACTS_STEP = 2_000_000
STAGES = (
    Stage(0, EVERYTHING),
    Stage(500, {"copying": 4, "repeated_text": 4, "json_list": 1, "picking": 1, "memory": 1, "json_extraction": 2}),
    Stage(750, EVERYTHING | FEWER_TOOLS),
    Stage(1500, EVERYTHING | FEWER_TOOLS | STILL_WEAK),
    Stage(FACTS_STEP, EVERYTHING | NEW_FACTS),
)

SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are jaxserve's demo model.", "Answer briefly.", "Be concise.",
                  "You are an assistant.", "You are ChatGPT.", "You are a helpful, honest and harmless assistant.",
                  "Be helpful.", "You are a pirate.", "Reply in one sentence.", "You are a friendly chatbot."]  # fmt: skip


def with_system_prompt(rng: random.Random, sample: Sample) -> Sample:
    if not sample.messages or sample.messages[0]["role"] == "system" or rng.random() > 0.3:
        return sample
    prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.7 else newcomers.pasted_text(rng, rng.randint(1, 2))
    system = {"role": "system", "content": prompt}
    return replace(sample, messages=[system, *sample.messages])


def training_samples(rng: random.Random, step: int = 0, long: bool = False) -> Iterator[Sample]:
    """Samples without end for one step of the training, none of which holds a held-out key."""
    weights = LONG_MIX if long else [stage.weights for stage in STAGES if stage.first_step <= step][-1]
    names = list(weights)
    while True:
        sample = TASKS[rng.choices(names, list(weights.values()))[0]](rng)
        if not any(is_held_out(key) for key in sample.keys):
            yield with_system_prompt(rng, sample)


def held_out_samples(name: str, count: int, seed: int) -> list[Sample]:
    """`count` samples of one task (fewer where it does not have as many) whose last question was held out."""
    rng = random.Random(f"{seed}/held-out/{name}")
    found: dict[str, Sample] = {}
    for _ in range(count * HELD_OUT_ONE_IN * 20):
        sample = TASKS[name](rng)
        if is_held_out(sample.keys[-1] if name != "memory" else sample.keys[0]):
            found.setdefault("/".join(sample.keys), sample)
        if len(found) == count:
            break
    return list(found.values())
