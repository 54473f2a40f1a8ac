"""What the HTTP routes need from the engine behind them. The TokenizerManager is one; tests bring a fake.

Until the server is ready some of it raises RequestError 503, which is just what a route should answer then.

Routes know this protocol and `jaxserve.server.requests`, never a socket, a worker process or a model.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from starlette.requests import Request

from jaxserve.scheduler.control.declaration import ControlStruct
from jaxserve.server.chat_templates import TemplateArguments
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.request_checks import ModelLimits
from jaxserve.server.requests import GenerateReqInput, GenerationChunk
from jaxserve.server.sinks import ChunkSink
from jaxserve.server.text_lanes import TextLanes
from jaxserve.server.tokenizer import TextTokenizer
from jaxserve.server.tracing import Tracer
from jaxserve.timeline import RequestTimeline


class GenerationService(Protocol):
    @property
    def lanes(self) -> TextLanes:
        """Where long texts are worked on."""

    @property
    def status(self) -> str:
        """starting, ready, draining or failed."""

    @property
    def num_programs_missing(self) -> int:
        """Programs that are still being compiled; until then steps may take longer."""
        ...

    @property
    def is_ready(self) -> bool:
        """New requests are served: the status is ready and generation is not paused."""

    @property
    def model_info(self) -> dict[str, Any]: ...

    @property
    def resolved_options(self) -> dict[str, Any]:
        """Server options that were left to be chosen, as they were; empty before the model is loaded."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """May be used from any thread."""

    @property
    def chat_template(self) -> str | None:
        """None: there is none, or no tokenizer."""

    @property
    def template_arguments(self) -> TemplateArguments:
        """What chat templates are given beside the conversation."""

    @property
    def limits(self) -> ModelLimits:
        """What the model and the engine can take."""

    @property
    def context_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def lora_adapters(self) -> Mapping[str, str]:
        """The LoRA adapters that are loaded, by name; their folders."""
        ...

    def check_num_sequences(self, num_prompts: int, n: int) -> None:
        """Raises RequestError if one request may not have so many; to ask before anything is done for each prompt."""

    @property
    def num_live(self) -> int:
        """Sequences that have not ended yet."""

    @property
    def num_live_by_rank(self) -> list[int]:
        """Of each replica."""
        ...

    @property
    def replica_states(self) -> list[str]:
        """Of each replica whether it serves: joining, up or down."""
        ...

    @property
    def tracer(self) -> Tracer | None:
        """None: nothing is traced."""

    @property
    def metrics(self) -> ServerMetrics | None:
        """Where HTTP requests are counted; None with --no-enable-metrics."""

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all processes, in a form that `accept` names, and their content type."""
        ...

    async def recent_requests(self) -> list[RequestTimeline]:
        """Time lines of the newest requests that have ended, and of all that have not."""

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """Sampling defaults of the model's generation_config.json, under SamplingParams' names."""

    @property
    def thinking_end(self) -> str | None:
        """The tag with which the model's thinking ends; None: not known."""

    def stream(self, req: GenerateReqInput, sink: ChunkSink) -> AbstractAsyncContextManager[None]:
        """Sends the request; its chunks go to the sink, on the loop. Raises RequestError, here or on entering, for bad input.
        Leaving aborts what still runs."""

    def generate(self, req: GenerateReqInput) -> AsyncGenerator[GenerationChunk, None]:
        """The same for a reader that takes chunks when it wants them. Closing the generator aborts what still runs."""

    async def control(self, request: ControlStruct) -> list[Any]:
        """The replies to a control request, of all workers that handle it. Raises RequestError if one refuses or fails."""

    async def health_check(self, timeout_s: float) -> bool: ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Raises RequestError if the template cannot render the messages, or they are far too long. From any thread."""


def service_of(request: Request) -> GenerationService:
    """The service of the app a request came to (`create_app` put it there)."""
    service: GenerationService = request.app.state.service
    return service
