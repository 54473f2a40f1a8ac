"""The Engine's methods for rollouts: samples of many prompts as arrays, all at once or prompt by prompt as they end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar, Unpack

from jaxserve.progress import Progress, progress_bar
from jaxserve.server.engine_base import EngineBase
from jaxserve.server.rollouts import RolloutJob, RolloutOptions, Rollouts
from jaxserve.server.text_lanes import CHARS_PER_NUMBER

T = TypeVar("T")


class RolloutMethods(EngineBase):
    def rollout(self, prompts: Any = None, sampling_params: Any = None, **options: Unpack[RolloutOptions]) -> Rollouts:
        """The samples of a text or of each of a list, as arrays; of `sampling_params` one for all, or one for each. `options`
        are RolloutOptions. Raises RequestError for what cannot be served, and if one of the samples fails."""
        return self._call(self._rollout(self._rollout_job(prompts, sampling_params, **options)))

    async def async_rollout(
        self, prompts: Any = None, sampling_params: Any = None, **options: Unpack[RolloutOptions]
    ) -> Rollouts:
        """As `rollout`, from any event loop. Cancelling aborts."""
        return await self._wait(self._rollout(self._rollout_job(prompts, sampling_params, **options)))

    def iter_rollouts(
        self, prompts: Any = None, sampling_params: Any = None, **options: Unpack[RolloutOptions]
    ) -> Iterator[tuple[int, Rollouts]]:
        """(number of a prompt, its samples), each when they have all ended. Arguments are those of `rollout`; without `max_len`
        each is as wide as it needs. Closing it aborts the others."""
        return self._iterate_rollouts(self._rollout_job(prompts, sampling_params, **options))

    def async_iter_rollouts(
        self, prompts: Any = None, sampling_params: Any = None, **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[tuple[int, Rollouts]]:
        """As `iter_rollouts`, from any event loop."""
        return self._iterate_rollouts_async(self._rollout_job(prompts, sampling_params, **options))

    def _rollout_job(self, prompts: Any, sampling_params: Any, **options: Unpack[RolloutOptions]) -> RolloutJob:
        return RolloutJob.plan(
            prompts,
            sampling_params,
            preferred_sampling_params=self.server_args.preferred_sampling_params,
            default_pad_token_id=self._pad_token_id(),
            **options,
        )

    def _pad_token_id(self) -> int:
        if self.server_args.skip_tokenizer_init:
            return 0
        pad = self._pipeline.manager.tokenizer.hf.pad_token_id
        return pad if isinstance(pad, int) else 0

    async def _rollout(self, job: RolloutJob) -> Rollouts:
        manager, over = self._pipeline.manager, asyncio.Event()

        def on_group(prompt: int) -> None:
            if sink.is_over:
                over.set()

        with _progress(job) as bar:
            sink = job.sink(on_row=bar.update, on_group=on_group)
            async with manager.stream(job.req, sink):
                job.check_prompt_lens()
                await over.wait()
                sink.check()
        shape = functools.partial(job.rollouts, sink, job.prompts)
        return await manager.lanes.run(CHARS_PER_NUMBER * sink.num_tokens, shape)

    def _iterate_rollouts(self, job: RolloutJob) -> Iterator[tuple[int, Rollouts]]:
        groups: queue.SimpleQueue[int] = queue.SimpleQueue()
        with _progress(job) as bar:
            sink = job.sink(on_row=bar.update, on_group=groups.put)
            stream = self._pipeline.manager.stream(job.req, sink)
            self._call(stream.__aenter__())
            try:
                job.check_prompt_lens()
                for _ in job.prompts:
                    prompt = groups.get()
                    with self._with_reason():
                        sink.check()
                    yield prompt, job.rollouts(sink, range(prompt, prompt + 1))
            finally:
                if not self._closed:
                    self._call(stream.__aexit__(None, None, None))

    async def _iterate_rollouts_async(self, job: RolloutJob) -> AsyncIterator[tuple[int, Rollouts]]:
        groups: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_group(prompt: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits on it
                loop.call_soon_threadsafe(groups.put_nowait, prompt)

        with _progress(job) as bar:
            sink = job.sink(on_row=bar.update, on_group=on_group)
            stream = self._pipeline.manager.stream(job.req, sink)
            with self._with_reason():
                await asyncio.wrap_future(self._submit(stream.__aenter__()))
            try:
                job.check_prompt_lens()
                for _ in job.prompts:
                    prompt = await groups.get()
                    with self._with_reason():
                        sink.check()
                    yield prompt, job.rollouts(sink, range(prompt, prompt + 1))
            finally:
                if not self._closed:
                    await asyncio.wrap_future(self._submit(stream.__aexit__(None, None, None)))


def _progress(job: RolloutJob) -> Progress:
    return progress_bar(job.req.num_sequences, "Rolling out", "sample", show=job.progress)
