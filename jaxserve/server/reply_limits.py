"""How much one request may be answered with beside its text: logprobs, hidden states, experts and vectors.

A prompt's tokens, the alternatives of each and the samples multiply to millions, which a reply must hold all at once. Here they
are counted before anything is sent to the scheduler.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.runner import Vectors
from jaxserve.server.requests import GenerateReqInput, PromptOptions, RequestError
from jaxserve.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class ReplyLimits:
    most_numbers: int | None  # of one request's logprobs, components of hidden states and experts; None: no limit
    hidden_size: int  # components of a hidden state
    num_experts: int = 0  # of a token, those of all layers

    @staticmethod
    def of(info: Mapping[str, Any], args: ServerArgs) -> ReplyLimits:
        """`info`: what a scheduler said of its model. What the options do not let be asked for is no number."""
        hidden_size = info["hidden_size"] if args.enable_return_hidden_states else 0
        return ReplyLimits(args.max_reply_numbers, hidden_size, math.prod(info.get("experts_shape") or (0,)))

    def rooms(self, req: GenerateReqInput, prompt_lens: Sequence[int], rooms: Sequence[int]) -> list[int]:
        """New tokens that each prompt has room for, `rooms` as far as the context goes: fewer where the request leaves their
        number open and there would be too much to say about them. Raises RequestError if it asks for too much itself."""
        if self.most_numbers is None:
            return list(rooms)
        asked = list(zip(req.options, req.sampling_params, prompt_lens, rooms, strict=True))
        total = sum(self._sure(*one) for one in asked)
        if total > self.most_numbers:
            largest = max(asked, key=lambda one: self._sure(*one))
            raise self._too_many(total, largest[0])
        open_rates = [self._per_token(options) for options, params, *_ in asked if params.max_new_tokens is None]
        rate = req.num_samples * sum(open_rates)
        if not rate:
            return list(rooms)
        most = (self.most_numbers - total) // rate
        if most < 1:
            raise self._too_many(total + rate, asked[0][0])
        return [min(room, most) if one[1].max_new_tokens is None else room for one, room in zip(asked, rooms, strict=True)]

    def check_vectors(self, vectors: Vectors | None, prompt_lens: Sequence[int]) -> None:
        """Raises RequestError if a request's vectors are too many numbers."""
        if self.most_numbers is None or vectors is None:
            return
        total = vectors.size * (sum(prompt_lens) if vectors.of_tokens else len(prompt_lens))
        if total > self.most_numbers:
            raise RequestError(
                f"The vectors of the request's {len(prompt_lens)} texts hold {total} numbers; one reply may hold at most "
                f"{self.most_numbers} (--max-reply-numbers). Send it in parts."
            )

    def _sure(self, options: PromptOptions, params: SamplingParams, prompt_len: int, room: int) -> int:
        """Of a prompt's samples, but for tokens whose number the request leaves open."""
        outputs = 0 if params.max_new_tokens is None else room
        count = outputs * self._per_token(options)
        if options.return_logprob and options.logprob_start_len >= 0:
            count += max(0, prompt_len - options.logprob_start_len) * _logprobs_per_token(options)
        if options.return_hidden_states:
            count += self.hidden_size * (prompt_len if options.return_hidden_states is True else 1)
        if options.return_routed_experts:
            count += max(0, prompt_len - options.routed_experts_start_len) * self.num_experts
        return count * params.n

    def _per_token(self, options: PromptOptions) -> int:
        """Numbers about each new token."""
        of_states = self.hidden_size if options.return_hidden_states is True else 0
        return _logprobs_per_token(options) + of_states + (self.num_experts if options.return_routed_experts else 0)

    def _too_many(self, total: int, options: PromptOptions) -> RequestError:
        field = self._largest_field(options)
        value = getattr(options, field)
        shown = f"{len(value)} tokens" if isinstance(value, tuple) else value
        return RequestError(
            f"{field} ({shown}) asks for {total} numbers, counting all of the request's prompts, samples and new tokens; one "
            f"reply may hold at most {self.most_numbers} (--max-reply-numbers).",
            param=field,
        )

    def _largest_field(self, options: PromptOptions) -> str:
        counts = {
            "return_hidden_states": self.hidden_size if options.return_hidden_states else 0,
            "return_routed_experts": self.num_experts if options.return_routed_experts else 0,
            "top_logprobs_num": options.top_logprobs_num if options.return_logprob else 0,
            "token_ids_logprob": len(options.token_ids_logprob or ()) if options.return_logprob else 0,
            "return_logprob": 1 if options.return_logprob else 0,
        }
        return max(counts, key=lambda field: counts[field])


NO_REPLY_LIMITS = ReplyLimits(None, 0)


def _logprobs_per_token(options: PromptOptions) -> int:
    return 1 + options.top_logprobs_num + len(options.token_ids_logprob or ()) if options.return_logprob else 0
