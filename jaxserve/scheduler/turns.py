"""Whose turn it is: prefill goes first, but never twice in a row over the heads of running requests.

The rule (`--prefill-decode-interval`, on by default with 1): after a prefill step, that many decode steps run before the next
prefill step, as long as there is a request that can decode. A prefill step holds at most `--chunked-prefill-size` prompt
tokens, so the gap between two tokens of a running request is at most one such step, whatever arrives.

It costs little where prefill should be fast. Each prefill step is still filled to its budget, so a burst of short prompts is
admitted in as few of them as without the rule; in between stands a decode step, short against a full prefill step, which
advances all that were admitted so far. With nothing to decode, prefill steps follow each other at once. A mixed step
carries the decode rows along and therefore owes nothing. 0 restores SGLang's plain prefill-first.
"""

from __future__ import annotations

DEFAULT_PREFILL_DECODE_INTERVAL = 1


class Turns:
    def __init__(self, prefill_decode_interval: int | None) -> None:
        self._interval = DEFAULT_PREFILL_DECODE_INTERVAL if prefill_decode_interval is None else prefill_decode_interval
        self._decode_steps_owed = 0

    def prefill_may_run(self, num_decode_rows: int) -> bool:
        return num_decode_rows == 0 or self._decode_steps_owed <= 0

    def after_prefill(self, has_decode_rows: bool) -> None:
        self._decode_steps_owed = 0 if has_decode_rows else self._interval

    def after_decode(self) -> None:
        self._decode_steps_owed -= 1
