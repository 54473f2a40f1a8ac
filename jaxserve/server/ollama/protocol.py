"""Request bodies of Ollama's routes. Plain data, parsed by msgspec; null means "not given".

What is done with all other fields stands in `foreign_fields`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.server.openai.protocol import Int32, Int64


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to draw tokens and when to stop."""

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    num_predict: Int32 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # Refused unless off
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    # Without effect: how Ollama loads a model, what belongs to the three above, and the reach of its penalties
    numa: Any = None
    num_ctx: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    num_thread: Any = None
    num_keep: Any = None
    repeat_last_n: Any = None
    penalize_newline: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None


class OllamaRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and generate share."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the context has room for, which is what Ollama means by any number below 1."""
        wanted = self.options.num_predict if self.options is not None else None
        return wanted if wanted is not None and wanted > 0 else None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
