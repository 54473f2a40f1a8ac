"""`jaxserve.Engine`: the whole engine behind Python calls, without HTTP.

The same pipeline as the server's, with its asyncio loop on a background thread. Every method may be called from any thread,
the async ones from any loop. Arguments and results are SGLang's: text or input_ids, one or a list; a dict or a list of dicts.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop

from jaxserve.config import ServerArgs, by_field
from jaxserve.handover import Handover
from jaxserve.scheduler.control.declaration import ControlStruct, first_failure
from jaxserve.scheduler.control.get_internal_state import GetInternalStateReq
from jaxserve.server.control.engine_methods import add_control_methods
from jaxserve.server.engine_manager import EngineTokenizerManager
from jaxserve.server.engine_rollouts import RolloutMethods
from jaxserve.server.engine_vectors import VectorMethods
from jaxserve.server.engine_weights import WeightMethods
from jaxserve.server.following import Following
from jaxserve.server.located import located
from jaxserve.server.named_tensors import AdapterMethods, TensorUpdateMethods
from jaxserve.server.native.input_embeds import with_embeds
from jaxserve.server.native.job import NativeJob
from jaxserve.server.native.positions import generate_body
from jaxserve.server.native.replies import Reply
from jaxserve.server.native.request import build_generate_request
from jaxserve.server.pipeline import Pipeline
from jaxserve.server.requests import RequestError
from jaxserve.server.sinks import WaitingChunks
from jaxserve.server.thinking_tokens import counter_of
from jaxserve.server.token_texts import TokenTexts
from jaxserve.server.version import package_version
from jaxserve.server.worker import Launchable, WorkerDiedError
from jaxserve.types import SamplingParams

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import Mesh

T = TypeVar("T")

_DRAIN_S = 0.0  # shutdown() does not wait for requests: whoever calls it has what it wanted


class EngineError(RuntimeError):
    """The engine cannot start, or has ended: the text is the reason."""


def _engine_args(model_path: str, server_args: ServerArgs | None, options: Mapping[str, Any]) -> ServerArgs:
    if server_args is None:
        named = {"model_path": model_path} if model_path else {}
        # One program brings all requests, as many as it has.
        defaults = {"log_level": "warning", "max_queued_requests": None, "max_reply_numbers": None}
        return ServerArgs.of({**defaults, **named, **options})
    if model_path or options:
        raise ValueError("Give either server_args or single options, not both.")
    return server_args


class Engine(RolloutMethods, VectorMethods, WeightMethods, TensorUpdateMethods, AdapterMethods):
    """Takes the options of a server as keyword arguments: the fields of ServerArgs, or their other names (`config.ALIASES`). A
    context manager; `shutdown` also runs at exit.

    Raises ValueError for what the caller can mend (an option, a checkpoint) and EngineError for anything else.
    """

    def __init__(
        self,
        model_path: str = "",
        *,
        server_args: ServerArgs | None = None,
        in_process: bool = False,
        mesh: Mesh | None = None,
        devices: Sequence[Device] | None = None,
        worker_commands: Sequence[Launchable] | None = None,
        **options: Any,
    ) -> None:
        """in_process: all of it on threads of this process and on devices that it holds, those of a `mesh`, or `devices`, in
        their order, or the first there are; tp_size is their number unless it is given. Signals, logging and JAX's
        configuration stay as they are. `worker_commands`: other workers than jaxserve's own, for tests."""
        tp_size_follows = server_args is None and "tp_size" not in by_field(options)
        server_args = _engine_args(model_path, server_args, options)
        if server_args.node_rank:
            raise ValueError(
                f"An Engine is host 0; got node_rank {server_args.node_rank}. On the others Engine.follow() takes the same "
                "options and returns when the Engine has ended."
            )
        if server_args.tokenizer_worker_num > 1:
            raise ValueError(
                f"tokenizer_worker_num is of servers, whose port several processes share; an Engine has no port. Got "
                f"{server_args.tokenizer_worker_num}."
            )
        if not in_process and (mesh is not None or devices is not None):
            raise ValueError("mesh and devices must come with in_process=True: other Engines start processes of their own.")
        self._handover = Handover() if in_process else None
        args = located(server_args)
        if self._handover is not None:
            # Here and not above: it imports JAX, which other Engines leave to their workers.
            from jaxserve.server.in_process import make_pipeline

            self._pipeline = make_pipeline(args, self._handover, mesh=mesh, devices=devices, tp_size_follows=tp_size_follows)
        else:
            self._pipeline = Pipeline(args, worker_commands)
        self.server_args = self._pipeline.args
        manager = self._pipeline.manager
        self._token_texts = TokenTexts(manager.decode, manager.token_bytes)
        self._loop = uvloop.new_event_loop()
        self._watch: asyncio.Task[Any] | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        # Worker processes are started on this thread and end with it: it lives until shutdown.
        self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="jaxserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)
        try:
            self._call(self._start())
        except BaseException as error:
            self.shutdown()
            if isinstance(error, WorkerDiedError):
                raise (ValueError if error.is_user_error else EngineError)(str(error)) from None
            raise

    @staticmethod
    def follow(model_path: str = "", *, server_args: ServerArgs | None = None, **options: Any) -> None:
        """On the other hosts of an Engine over several (nnodes, node_rank): does as that one says, and returns when it has
        ended. Takes the same options. Raises as the constructor does, and EngineError if a host fails or is lost."""
        death = uvloop.run(Following(located(_engine_args(model_path, server_args, options))).run())
        if death is not None:
            raise (ValueError if death.is_user_error else EngineError)(str(death))

    # --- generating

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | SamplingParams | list[Any] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *others: Any,
        **fields: Any,
    ) -> Reply | list[Reply] | Iterator[Reply]:
        """A reply, a list of replies for a list of prompts or n > 1, or an iterator of replies so far if `stream`.

        `fields` are further fields of POST /generate: stream, rid, return_logprob, ...; `others` some of them at SGLang's
        positions (`native.positions`). Raises RequestError for a request that cannot be served.
        """
        job = self._job(generate_body(prompt, sampling_params, input_ids, others, fields))
        if job.native.req.stream:
            return self._iterate(job)
        return self._call(self._whole(job))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Mapping[str, Any] | SamplingParams | list[Any] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *others: Any,
        **fields: Any,
    ) -> Reply | list[Reply] | AsyncIterator[Reply]:
        """As `generate`, from any event loop; with `stream` the result is an async iterator. Cancelling aborts."""
        job = self._job(generate_body(prompt, sampling_params, input_ids, others, fields))
        if job.native.req.stream:
            return self._iterate_async(job)
        return await self._wait(self._whole(job))

    def _job(self, body: dict[str, Any]) -> NativeJob:
        manager = self._pipeline.manager
        body = with_embeds(body, lambda: manager.limits)
        native = build_generate_request(body, self.server_args.preferred_sampling_params, manager.thinking_end)
        thinking = counter_of(native.req.thinking, manager)
        return NativeJob(native, self.server_args, self._token_texts.__getitem__, count_thinking=thinking)

    async def _whole(self, job: NativeJob) -> Reply | list[Reply]:
        manager = self._pipeline.manager
        return await job.whole(manager.generate(job.native.req), manager.lanes, lambda reply: reply)

    # --- control

    def control(self, request: ControlStruct) -> Any:
        """Serves any control request; each also has a method of its own (`add_control_methods`). Returns its reply; raises
        RequestError if it is refused."""
        return first_failure(self._call(self._pipeline.manager.control(request)))

    async def async_control(self, request: ControlStruct) -> Any:
        """As `control`, from any event loop."""
        return first_failure(await self._wait(self._pipeline.manager.control(request)))

    def get_server_info(self) -> dict[str, Any]:
        """The options, what the workers reported, and the scheduler's state."""
        replies = self._call(self._pipeline.manager.control(GetInternalStateReq()))
        states = [reply.internal_state for reply in replies]
        return {
            **self.server_args.public_dict(),
            **self._pipeline.manager.resolved_options,
            **self._pipeline.worker_info,
            "version": package_version(),
            "kv_events": self.server_args.describe_kv_events(states[0]["page_size"]),
            "internal_states": states,
        }

    def get_model_info(self) -> dict[str, Any]:
        """What is served: paths, names, the version of the weights."""
        return self._pipeline.manager.model_info

    def get_all_child_pids(self) -> list[int]:
        """Of the worker processes."""
        return list(self._pipeline.workers.pids().values())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...  # the methods of control requests

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer; None with skip_tokenizer_init."""
        return None if self.server_args.skip_tokenizer_init else self._pipeline.manager.tokenizer.hf

    @property
    def tokenizer_manager(self) -> EngineTokenizerManager:
        """For programs that reach through to SGLang's."""
        context_len = self._pipeline.manager.context_len
        return EngineTokenizerManager(self.server_args, self.tokenizer, context_len, self.abort_request)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return self._pipeline.manager.num_live

    # --- life

    def shutdown(self) -> None:
        """Aborts what runs and ends the workers. May be called again."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.shutdown)
        with contextlib.suppress(concurrent.futures.CancelledError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    async def _start(self) -> None:
        await self._pipeline.start()
        await self._pipeline.wait_ready()
        self._watch = asyncio.create_task(self._pipeline.watch())

    async def _close(self) -> None:
        try:
            if self._watch is not None and self._pipeline.manager.status == "ready":
                self._watch.cancel()
                await self._pipeline.drain(_DRAIN_S)
        except WorkerDiedError:
            pass  # it is gone, which is what was wanted
        finally:
            await self._pipeline.close()

    # --- between the caller's thread or loop and ours

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        if self._closed:
            work.close()
            raise EngineError("The engine has been shut down.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            with self._with_reason():
                return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the request is aborted
            raise

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._with_reason():
            return await asyncio.wrap_future(self._submit(work))

    @contextlib.contextmanager
    def _with_reason(self) -> Iterator[None]:
        """Whoever runs an Engine is its operator: why a worker died, which a server tells its log, is told here."""
        try:
            yield
        except RequestError as error:
            death = self._pipeline.death
            if death is None or error.status_code < 500:
                raise
            raise EngineError(str(death)) from None

    def _iterate(self, job: NativeJob) -> Iterator[Reply]:
        replies, news = job.streamed(), threading.Event()
        waiting = WaitingChunks(news.set)
        stream = self._pipeline.manager.stream(job.native.req, waiting)
        self._call(stream.__aenter__())
        ended = False
        try:
            while not ended:
                news.wait()
                news.clear()
                chunks, ended = waiting.take()
                with self._with_reason():
                    yield from map(replies.event, chunks)
        finally:
            if not self._closed:
                self._call(stream.__aexit__(None, None, None))

    async def _iterate_async(self, job: NativeJob) -> AsyncIterator[Reply]:
        replies, news = job.streamed(), asyncio.Event()
        waiting = WaitingChunks(functools.partial(_set_on, asyncio.get_running_loop(), news))
        stream = self._pipeline.manager.stream(job.native.req, waiting)
        with self._with_reason():
            await asyncio.wrap_future(self._submit(stream.__aenter__()))
        ended = False
        try:
            while not ended:
                await news.wait()
                news.clear()
                chunks, ended = waiting.take()
                with self._with_reason():
                    for chunk in chunks:
                        yield replies.event(chunk)
        finally:
            if not self._closed:
                await asyncio.wrap_future(self._submit(stream.__aexit__(None, None, None)))


def _set_on(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits on it
        loop.call_soon_threadsafe(event.set)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        with contextlib.suppress(RuntimeError):  # newer Pythons start no thread for it while the interpreter ends
            loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


add_control_methods(Engine)
