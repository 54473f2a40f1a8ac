"""`best_of`: the samples of each prompt that the model itself finds likeliest, per token, as OpenAI ranks them."""

from __future__ import annotations

from jaxserve.server.openai.collect import Sequence


def best_sequences(sequences: list[Sequence], num_samples: int, num_choices: int) -> list[Sequence]:
    """So many of each prompt's samples, the best first; all of them as they are if none is left out."""
    if num_choices == num_samples:
        return sequences
    prompts = [sequences[first : first + num_samples] for first in range(0, len(sequences), num_samples)]
    return [best for samples in prompts for best in sorted(samples, key=_mean_logprob, reverse=True)[:num_choices]]


def _mean_logprob(sequence: Sequence) -> float:
    logprobs = [entry.logprob for entry in sequence.logprobs if entry.logprob is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")
