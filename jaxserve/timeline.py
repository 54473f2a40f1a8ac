"""The time line of a request: what happened to it, and when. Plain data, bounded, and nothing of what was asked or answered.

The scheduler fills a RequestTimes while the request goes through it; it travels with the request's last message. The main
process adds what happened before and behind that (RequestTimeline) and hands it to whoever observes: metrics, traces, the
dashboard, the log. All times are Unix times in seconds; 0 says that it never came to that.
"""

from __future__ import annotations

import msgspec

# Entries of a list; what comes beyond them is added to the last (chunks), or only counted (retractions).
MAX_ENTRIES = 64


class PrefillChunk(msgspec.Struct, array_like=True, gc=False):
    """Tokens of a prompt (or of one that is computed again) in one step: from its launch until its results were taken in."""

    start_s: float
    end_s: float  # 0 while the step is in flight
    num_tokens: int


class RequestTimes(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request's life in the scheduler."""

    queue_entry_s: float = 0.0
    grammar_ready_s: float = 0.0  # the end of its wait for a grammar, if it had one
    first_scheduled_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    chunks: list[PrefillChunk] = []
    num_chunks: int = 0  # there were
    retractions_s: list[float] = []
    num_retractions: int = 0
    num_jumps: int = 0  # over tokens that its grammar forces
    verify_steps: int = 0  # steps that verified drafts for it
    proposed_drafts: int = 0  # in those steps, as many as fit
    accepted_drafts: int = 0

    def chunk_launched(self, now_s: float, num_tokens: int) -> None:
        self.num_chunks += 1
        if len(self.chunks) < MAX_ENTRIES:
            self.chunks.append(PrefillChunk(now_s, 0.0, num_tokens))
        else:
            last = self.chunks[-1]
            last.num_tokens, last.end_s = last.num_tokens + num_tokens, 0.0

    def chunk_done(self, now_s: float) -> None:
        """The oldest chunk in flight; of the last entry, which may be several, the newest end stays."""
        next((chunk for chunk in self.chunks if not chunk.end_s), self.chunks[-1]).end_s = now_s

    def ended(self, now_s: float) -> None:
        """Nobody takes in the results of what is in flight."""
        self.finished_s = now_s
        for chunk in self.chunks:
            chunk.end_s = chunk.end_s or now_s

    def retracted(self, now_s: float) -> None:
        self.num_retractions += 1
        if len(self.retractions_s) < MAX_ENTRIES:
            self.retractions_s.append(now_s)


class RequestTimeline(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A sequence from its arrival to its last chunk: one of a request's n."""

    rid: str
    received_s: float
    sent_s: float = 0.0  # tokenized, and given to the scheduler
    dp_rank: int | None = None  # of the replica that it was given to
    first_text_s: float = 0.0  # the first chunk reached the main process
    answered_s: float = 0.0  # its last chunk went to its reader; 0: it is live
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # of live ones, so far
    num_samples: int = 1  # sequences of its prompt
    is_stream: bool = False
    is_constrained: bool = False  # it had a grammar
    labels: tuple[str, ...] = ()  # values of the custom labels of metrics
    finish: str = ""  # stop, length or abort
    status_code: int | None = None  # of an abort that is an error
    scheduler: RequestTimes | None = None  # None while it is live, or if it never came to that
