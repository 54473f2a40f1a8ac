"""`bench offline`: all prompts given to an Engine at once; how long until the last is answered.

Records have the names of SGLang's bench_offline_throughput. The same prompts as `bench serving` sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.bench.record import LOAD_FIELDS, Record, header
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.work import Task
from jaxserve.server.engine import Engine
from jaxserve.server.requests import RequestError

_WARMUP_TOKENS = 32


@dataclasses.dataclass
class _Answers:
    """What came of the prompts so far, each at its place; None: nothing yet."""

    replies: list[dict[str, Any] | None]
    errors: list[str | None]
    started_s: float = dataclasses.field(default_factory=time.perf_counter)
    duration_s: float = 0.0
    interrupted: bool = False


class OfflineBench:
    def __init__(self, engine: Engine, options: ServingOptions, tasks: Sequence[Task]) -> None:
        """Prompts are texts or token ids, of one turn."""
        self._engine, self._options, self._tasks = engine, options, tasks

    def warm_up(self) -> None:
        """Raises RequestError if the engine takes no such request."""
        for task in self._tasks[: self._options.warmup_requests]:
            short = dict(self._sampling(task), max_new_tokens=min(task.output_len, _WARMUP_TOKENS))
            self._engine.generate(sampling_params=short, **_prompt(task))

    def run(self, on_answer: Callable[[], object] = lambda: None) -> Record:
        """With an empty prefix cache. Ctrl-C ends it: the record then is of what was answered until then."""
        self._engine.flush_cache()
        with self._profiled():
            answers = asyncio.run(self._ask(on_answer))
        return self._record(answers)

    async def _ask(self, on_answer: Callable[[], object]) -> _Answers:
        count = len(self._tasks)
        answers = _Answers([None] * count, [None] * count)

        async def ask(place: int, task: Task) -> None:
            try:
                reply: Any = await self._engine.async_generate(sampling_params=self._sampling(task), **_prompt(task))
                answers.replies[place] = reply
            except RequestError as error:
                answers.errors[place] = error.message
            on_answer()

        asked = [asyncio.create_task(ask(place, task)) for place, task in enumerate(self._tasks)]
        try:
            await asyncio.gather(*asked)
        except asyncio.CancelledError:  # Ctrl-C
            answers.interrupted = True
        answers.duration_s = time.perf_counter() - answers.started_s
        return answers

    def _sampling(self, task: Task) -> dict[str, Any]:
        options = self._options
        schema = {} if task.schema is None else {"json_schema": task.schema}
        return {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_new_tokens": task.output_len,
            "ignore_eos": task.schema is None and not options.disable_ignore_eos,
            **schema,
            **options.extra_body,
        }

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        if not self._options.profile:
            yield
            return
        body = self._options.profile_body()
        self._engine.start_profile(**body)
        try:
            yield
        finally:
            if "num_steps" not in body:
                self._engine.stop_profile()

    def _record(self, answers: _Answers) -> Record:
        server_info = self._engine.get_server_info()
        replies = [reply for reply in answers.replies if reply is not None]
        about = [reply["meta_info"] for reply in replies]
        tokens_in = sum(one["prompt_tokens"] for one in about)
        tokens_out = sum(one["completion_tokens"] for one in about)
        took_s = answers.duration_s
        record = header("offline") | {
            **{name: getattr(self._options, name) for name in LOAD_FIELDS},
            "tag": self._options.tag,
            "model": server_info["served_model_name"],
            "interrupted": answers.interrupted,
            "successful_requests": len(replies),
            "failed": sum(error is not None for error in answers.errors),
            "failures": _by_message(answers.errors),
            "total_latency": took_s,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "cached_tokens": sum(one["cached_tokens"] for one in about),
            "last_gen_throughput": server_info["internal_states"][0]["last_gen_throughput"],
            "request_throughput": len(replies) / took_s,
            "input_throughput": tokens_in / took_s,
            "output_throughput": tokens_out / took_s,
            "total_throughput": (tokens_in + tokens_out) / took_s,
            "server_info": server_info,
        }
        return record | (_details(answers) if self._options.output_details else {})


def _prompt(task: Task) -> dict[str, Any]:
    (content,) = task.turns
    return {"prompt": content} if isinstance(content, str) else {"input_ids": content}


def _by_message(errors: Sequence[str | None]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for error in errors:
        if error is not None:
            found.setdefault(error, {"count": 0, "message": error})["count"] += 1
    return found


def _details(answers: _Answers) -> Record:
    """One entry for each prompt."""
    about = [{} if reply is None else reply["meta_info"] for reply in answers.replies]
    return {
        "input_lens": [one.get("prompt_tokens", 0) for one in about],
        "output_lens": [one.get("completion_tokens", 0) for one in about],
        "generated_texts": ["" if reply is None else reply.get("text", "") for reply in answers.replies],
        "errors": ["" if error is None else error for error in answers.errors],
    }
