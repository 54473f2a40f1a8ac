"""ChunkTimes: how long a chunk of a prompt may be so that it takes no longer than the first one (--enable-dynamic-chunking).

c tokens behind L others take a * c + b * (L * c + c * c / 2): a for the matrices that each token goes through, b for each pair
of tokens that attention looks at. The ratio b / a is the model's (`RunnerSpec.attention_work_ratio`). A step takes its matrices
for as many tokens as its program is made for; so chunks are chosen with that number in place of c, as long as the time allows.

In a pipeline stages wait for a step that takes longer than those before and behind it; and what decodes waits for no longer
beside the end of a long prompt than beside its beginning. SGLang, which this option is from, measures b / a with prompts at its
start, and goes a part of the way only, down to a quarter of the first chunk.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class ChunkTimes:
    """Times are counted in tokens of a prompt's beginning."""

    work_ratio: float  # b / a
    page_size: int
    token_buckets: tuple[int, ...] = ()  # tokens that programs are made for; empty: any number

    def longest(self, start: int, budget: int, beside: int) -> int:
        """Tokens, whole pages, behind `start` others, that take no longer than `budget` tokens at a prompt's beginning; at
        least a page, if the budget is one. `beside`: what the step holds already."""
        if not start or budget < self.page_size:
            return budget
        most, pairs = 0.0, self.work_ratio * budget * budget / 2
        rooms = [bucket - beside for bucket in self.token_buckets]
        limit = pairs + min((room for room in rooms if room >= budget), default=budget)
        for room in rooms:
            if room >= self.page_size and limit > room:
                most = max(most, min(self._tokens_in(limit - room, start, per_token=0.0), room))
        if not rooms:
            most = self._tokens_in(limit, start, per_token=1.0)
        return max(int(min(most, budget)) // self.page_size, 1) * self.page_size

    def at_beginning(self, start: int, length: int) -> int:
        """Tokens of a prompt's beginning that take as long as `length` tokens behind `start` others."""
        if not start:
            return length
        pairs = start * length + length * length / 2
        return math.ceil(self._tokens_in(length + self.work_ratio * pairs, 0, per_token=1.0))

    def _tokens_in(self, time: float, start: int, per_token: float) -> float:
        """c with per_token * c + b / a * (start * c + c * c / 2) = time."""
        linear = per_token + self.work_ratio * start
        return 2 * time / (linear + math.sqrt(linear * linear + 2 * self.work_ratio * time))
