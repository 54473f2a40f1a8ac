"""Hidden states in the choices of OpenAI's replies, as SGLang has them there: the last one alone."""

from __future__ import annotations

from typing import Any, Literal

from jaxserve.messages import HiddenStates
from jaxserve.server.long_json import packed
from jaxserve.server.openai.protocol import OpenAIRequest


def asked_states(request: OpenAIRequest) -> Literal["last"] | bool:
    """What is to be asked of the model."""
    return "last" if request.return_hidden_states else False


def hidden_states_field(request: OpenAIRequest, last: HiddenStates | None) -> dict[str, Any]:
    """The field of a choice, if there is to be one: a vector, or a list of it for "last". Of a prompt's states, which a single
    output has alone, only "last" tells."""
    if not request.return_hidden_states or last is None:
        return {}
    outputs = [] if last.outputs is None else [packed(last.outputs[-1].tolist())]
    if request.return_hidden_states == "last":
        prompt = [] if last.prompt is None else [packed(last.prompt[-1].tolist())]
        return {"hidden_states": [*prompt, *outputs][-1:]}
    return {"hidden_states": outputs[0] if outputs else []}
