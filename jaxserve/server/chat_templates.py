"""Which chat template is used, and what requests may give it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxserve.config import ServerArgs

# Arguments of the functions between a request and the template that are the server's business; all other names reach the
# template.
_OWN = frozenset(
    ("self", "messages", "conversation", "conversations", "tools", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs", "sanitize_control_tokens")
)  # fmt: skip
_DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class TemplateArguments:
    """What a chat template is given beside the conversation."""

    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)  # where a request says nothing else
    trusts_requests: bool = False  # they may bring a template of their own

    @staticmethod
    def of(args: ServerArgs) -> TemplateArguments:
        """Raises ValueError with a sentence."""
        defaults = json.loads(args.default_chat_template_kwargs or "{}")
        if refused := sorted(_OWN & defaults.keys()):
            raise ValueError(f"--default-chat-template-kwargs must not hold {', '.join(refused)}.")
        return TemplateArguments(defaults, args.trust_request_chat_template)

    def check(self, given: dict[str, Any]) -> None:
        """Raises ValueError with a sentence about chat_template_kwargs."""
        refused = _OWN & given.keys()
        if self.trusts_requests and "chat_template" in refused:
            refused -= {"chat_template"}
            if not isinstance(given["chat_template"], str):
                raise ValueError("chat_template_kwargs.chat_template must be a string.")
        if "chat_template" in refused:
            raise ValueError(
                "chat_template_kwargs must not hold chat_template: this server runs without --trust-request-chat-template."
            )
        if refused:
            raise ValueError(f"chat_template_kwargs must not hold {', '.join(sorted(refused))}.")


def chosen_template(of_tokenizer: Any, given: str | None, name: str | None) -> Any:
    """The template, or templates by name, of a tokenizer that has `of_tokenizer`: text, texts by name, or None.

    `given`: a file or a name of one of them (--chat-template). `name`: a name (--hf-chat-template-name). Raises ValueError with
    a sentence.
    """
    named = of_tokenizer if isinstance(of_tokenizer, dict) else {}
    if given is not None:
        return named[given] if given in named and not Path(given).exists() else _read(given, named)
    if name is not None:
        if name not in named:
            raise ValueError(f"--hf-chat-template-name {name!r}: {_has(named)}.")
        return named[name]
    if named and _DEFAULT not in named:  # as in SGLang
        return next(iter(named.values()))
    return of_tokenizer


def _read(path: str, named: dict[str, str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"--chat-template {path!r} cannot be read: there is no such file, and {_has(named)}.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chat-template {path!r} cannot be read: {error}") from error


def _has(named: dict[str, str]) -> str:
    return f"the tokenizer has the templates {', '.join(named)}" if named else "the tokenizer has no templates with names"
