"""What the OpenAI routes share for one app: the service, the options, texts of tokens, and how the model's messages read."""

from __future__ import annotations

import dataclasses
from typing import Any

from starlette.requests import Request

from jaxserve.config import ServerArgs
from jaxserve.parsers.message import MessageFormat
from jaxserve.server.http.service import GenerationService
from jaxserve.server.openai.fim import FimFormat
from jaxserve.server.openai.system_messages import InlineSystem
from jaxserve.server.token_texts import TokenTexts


@dataclasses.dataclass(frozen=True)
class OpenAIContext:
    service: GenerationService
    args: ServerArgs
    texts: TokenTexts
    started_s: int  # Unix time; the model's `created`
    inline_system: InlineSystem
    message_format: MessageFormat
    completion_template: FimFormat | None = None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """What a chat's request leaves out, under SamplingParams' names."""
        return self.service.generation_defaults if self.args.sampling_defaults == "model" else {}


def context_of(request: Request) -> OpenAIContext:
    context: OpenAIContext = request.app.state.openai
    return context
