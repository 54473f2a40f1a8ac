"""The reply to a chat completion in one piece."""

from __future__ import annotations

import functools
from typing import Any

from jaxserve.server.openai.chat.message import Message
from jaxserve.server.openai.chat.plan import ChatJob
from jaxserve.server.openai.collect import Ending, Sequence, gather, shaped
from jaxserve.server.openai.hidden_states import hidden_states_field
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.replies import whole_reply
from jaxserve.server.requests import GenerationChunk


async def reply_of(job: ChatJob) -> list[bytes]:
    """Reads the request to its end."""
    service = job.context.service
    return await shaped(service.lanes, await gather(service.generate(job.generate), job.usage), functools.partial(_reply, job))


def _reply(job: ChatJob, sequences: list[Sequence]) -> list[bytes]:
    choices = [_choice(job, index, sequence) for index, sequence in enumerate(sequences)]
    return whole_reply("chat.completion", job.reply_id, job.created_s, choices, sequences, job.usage, job.body, job.model)


def _choice(job: ChatJob, index: int, sequence: Sequence) -> dict[str, Any]:
    body, last = job.body, sequence.last
    assert last is not None, f"choice {index} of {job.reply_id} has no chunks"
    parser = job.message_parser()
    message = Message.of([*parser.feed(sequence.text), *parser.finish()])
    ending = Ending.of(sequence.finish_reason, has_calls=bool(message.calls))
    choice: dict[str, Any] = {
        "index": index,
        "message": message.to_openai(),
        "logprobs": chat_logprobs(sequence.logprobs, job.context.texts) if body.logprobs else None,
        "finish_reason": ending.finish_reason,
        "matched_stop": ending.matched_stop,
        **hidden_states_field(body, sequence.hidden_states),
    }
    if body.return_token_ids:
        choice["token_ids"] = sequence.token_ids
    if body.return_token_ids or body.return_prompt_token_ids:
        choice["prompt_token_ids"] = job.prompt_ids
    if body.return_meta_info:
        choice["meta_info"] = meta_info(last)
    return choice


def meta_info(last: GenerationChunk) -> dict[str, Any]:
    """SGLang's meta_info of a finished choice."""
    assert last.finish_reason is not None, f"{last.rid} has not ended"
    return {
        "id": last.rid,
        "finish_reason": last.finish_reason.to_dict(),
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "cached_tokens": last.cached_tokens,
        **last.meta,
    }
