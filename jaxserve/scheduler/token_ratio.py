"""NewTokenRatio: which share of the output that running requests may still produce is held free for them (SGLang's tracker).

Most requests end long before max_new_tokens, so reserving all of it would leave the cache half empty. The share starts high,
falls with every decode step that went well, and jumps up when memory did run out and requests had to be retracted.
"""

from __future__ import annotations

INITIAL_RATIO = 0.7
MIN_FACTOR = 0.14  # of the initial ratio
DECAY_STEPS = 600
# After a retraction each remaining request should be good for this many steps.
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    def __init__(self, conservativeness: float, num_stages: int = 1) -> None:
        """`num_stages`: of a pipeline, in which as many steps together decode all requests."""
        self._initial = min(INITIAL_RATIO * conservativeness, 1.0)
        self._least = self._initial * MIN_FACTOR
        self._decay = (self._initial - self._least) / (DECAY_STEPS * num_stages)
        self.value = self._initial

    def after_decode(self) -> None:
        self.value = max(self.value - self._decay, self._least)

    def after_retraction(self, num_decoded_tokens: int, num_max_new_tokens: int, num_requests: int) -> None:
        """Sums over the requests that kept running, and how many they are."""
        wanted = (num_decoded_tokens + RETRACT_DECODE_STEPS * num_requests) / (num_max_new_tokens + 1)
        self.value = min(max(wanted, self._least), 1.0)

    def reset(self) -> None:
        self.value = self._initial
