"""POST /v1/chat/completions: messages through the model's chat template, a message out.

    body -> plan: ChatCompletionRequest -> template -> token ids -> ChatJob (GenerateReqInput)
    chunks -> MessageParser -> pieces -> reply, or events

`plan` and `ChatJob` serve other protocols, too: what their requests ask for, they say in the words of a chat completion.
"""

from jaxserve.server.openai.chat.plan import ChatJob, plan
from jaxserve.server.openai.chat.route import router

__all__ = ["ChatJob", "plan", "router"]
