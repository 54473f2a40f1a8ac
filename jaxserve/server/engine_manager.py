"""`Engine.tokenizer_manager`: what programs written for SGLang ask its TokenizerManager. No more than that is here."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from jaxserve.config import ServerArgs
from jaxserve.models import ModelConfig


@dataclasses.dataclass(frozen=True)
class EngineTokenizerManager:
    server_args: ServerArgs
    tokenizer: Any  # the Hugging Face tokenizer; None with skip_tokenizer_init
    context_len: int
    _abort: Callable[..., Any]

    @property
    def model_path(self) -> str:
        return self.server_args.model_path

    @property
    def served_model_name(self) -> str:
        return self.server_args.effective_served_model_name

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """`vocab_size`, `hidden_size`, ... under jaxserve's names."""
        args = self.server_args
        overrides = json.loads(args.json_model_override_args)
        return ModelConfig.from_pretrained(args.model_path, overrides, is_embedding=args.is_embedding)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Of all requests whose id begins so, or of all. Each still gets its end."""
        self._abort(rid=rid, abort_all=abort_all)
