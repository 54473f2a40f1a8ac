"""What the OpenAI routes share for one app: the service, the options, texts of tokens, and how the model's messages read."""

from __future__ import annotations

import dataclasses

from starlette.requests import Request

from jaxserve.config import ServerArgs
from jaxserve.parsers.message import MessageFormat
from jaxserve.server.http.service import GenerationService
from jaxserve.server.token_texts import TokenTexts


@dataclasses.dataclass(frozen=True)
class OpenAIContext:
    service: GenerationService
    args: ServerArgs
    texts: TokenTexts
    started_s: int  # Unix time; the model's `created`
    message_format: MessageFormat


def context_of(request: Request) -> OpenAIContext:
    context: OpenAIContext = request.app.state.openai
    return context
