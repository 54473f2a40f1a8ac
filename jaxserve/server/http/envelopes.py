"""The shape in which each protocol tells an error. Which protocol it is follows from the path."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.server.requests import RequestError

# What a client sent is quoted in messages, in places uncut.
_MAX_MESSAGE_CHARS = 2000


@dataclasses.dataclass(frozen=True)
class Envelope:
    name: str  # of its schema in /openapi.json
    description: str
    shape: Callable[[RequestError], dict[str, Any]]
    # Behind the routes a request has SGLang's names; whoever called one of the protocol's routes used these.
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self, error: RequestError) -> dict[str, Any]:
        message = error.message
        if len(message) > _MAX_MESSAGE_CHARS:
            message = message[:_MAX_MESSAGE_CHARS] + "..."
        param = self.names.get(error.param or "", error.param)
        if param != error.param:
            message = re.sub(rf"\b{error.param}\b", str(param), message)
        return self.shape(RequestError(message, error.status_code, error.err_type, param, error.code))


def _native(error: RequestError) -> dict[str, Any]:
    fields = {"message": error.message, "type": error.err_type, "code": error.status_code}
    return {"object": "error", **fields, "error": fields}


def _openai(error: RequestError) -> dict[str, Any]:
    code = error.code if error.code is not None else error.status_code
    fields = {"message": error.message, "type": error.err_type, "param": error.param, "code": code}
    return {"object": "error", **fields, "error": fields}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def _anthropic(error: RequestError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(error.status_code, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _ollama(error: RequestError) -> dict[str, Any]:
    return {"error": error.message}


NATIVE = Envelope(
    "Error",
    "An error of a path that does not begin with /v1/ or /api/: an object, and the same keys beside it. `code` is the status.",
    _native,
)
OPENAI = Envelope(
    "OpenAIError",
    "An error of a path below /v1/: OpenAI's object, and the same keys beside it, as SGLang has them.",
    _openai,
    {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed", "text": "prompt"},
)
ANTHROPIC = Envelope(
    "AnthropicError",
    "An error of /v1/messages.",
    _anthropic,
    {
        "max_new_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "json_schema": "output_config.format",
        "text": "messages",
    },
)
OLLAMA = Envelope(
    "OllamaError",
    "An error of a path below /api/.",
    _ollama,
    {
        "max_new_tokens": "num_predict",
        "repetition_penalty": "repeat_penalty",
        "sampling_seed": "seed",
        "reasoning_effort": "think",
        "response_format": "format",
        "json_schema": "format",
        "text": "prompt",
    },
)
# Of routes whose texts are not prompts.
_OPENAI_INPUT = dataclasses.replace(OPENAI, names={"text": "input", "input_ids": "input"})
_OPENAI_OWN = dataclasses.replace(OPENAI, names={})
# The first prefix that fits.
_BY_PATH = (
    ("/v1/messages", ANTHROPIC),
    ("/v1/embeddings", _OPENAI_INPUT),
    ("/v1/classify", _OPENAI_INPUT),
    ("/v1/rerank", _OPENAI_OWN),
    ("/v1/score", _OPENAI_OWN),
    ("/v1/", OPENAI),
    ("/api/", OLLAMA),
)
ENVELOPES = (NATIVE, OPENAI, ANTHROPIC, OLLAMA)


def envelope_of(path: str) -> Envelope:
    return next((envelope for prefix, envelope in _BY_PATH if path.startswith(prefix)), NATIVE)
