"""/v1/responses: OpenAI's Responses over the chat route's plan.

    body -> items (kept ones, then the new) -> ChatCompletionRequest -> plan -> chunks -> MessageParser -> output items

What a reply may go on from is kept in memory, within bounds (`store`).
"""

from jaxserve.server.openai.responses.route import router

__all__ = ["router"]
