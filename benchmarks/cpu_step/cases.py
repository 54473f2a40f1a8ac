"""What is timed: a prompt, or decode steps of a batch. Imports nothing, so that a foreign interpreter can read it too."""

from __future__ import annotations

PROMPT_LEN = 2048
SHORTEST, LONGEST = 256, 1024
DECODE_STEPS = 16
BATCHES = (1, 8, 32)
CASES = ("prefill", *(f"decode {batch}" for batch in BATCHES))


def batch_of(case: str) -> int | None:
    """Rows of a decode case; None: it is a prompt's."""
    return None if case == "prefill" else int(case.split()[1])


def contexts(batch: int) -> list[int]:
    """Tokens that each row has in its cache, spread evenly around their mean."""
    mean = (SHORTEST + LONGEST) // 2
    if batch == 1:
        return [mean]
    return [SHORTEST + (LONGEST - SHORTEST) * row // (batch - 1) for row in range(batch)]
