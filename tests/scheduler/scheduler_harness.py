"""A scheduler with a fake runner and an in-memory transport: submit requests, turn the loop by hand, look at what came out.

Every message is checked on its way: encodable, arrays of the right types and lengths, nothing after a request's end.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from fake_answers import embeddings_of
from fake_runner import FakeRunner, fake_spec

from jaxserve.cache import KVCacheEvent
from jaxserve.config import ServerArgs
from jaxserve.messages import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    ControlRequest,
    DetokenizerInput,
    HiddenStates,
    InputLogprobs,
    Message,
    ProfileBegan,
    ProfileEnded,
    Route,
    ShutdownReq,
    TokenizedGenerateReqInput,
    TokenizerInput,
    TokenLogprobs,
    decoder,
    encode,
    pack,
    unpack,
)
from jaxserve.runner import NO_TOKEN_ID, StepInput
from jaxserve.scheduler.control.abort_request import AbortRequest
from jaxserve.scheduler.control.declaration import ControlStruct
from jaxserve.scheduler.control.registry import control_of, controls
from jaxserve.scheduler.loop import SchedulerLoop
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.stops import StopTextDecoder
from jaxserve.timeline import RequestTimes
from jaxserve.types import FinishReason, ForwardMode, LogitRules, SamplingParams, Thinking


class Clock:
    """Time that stands still unless told otherwise."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class LetterDecoder:
    """Token i is a letter; enough for stop strings."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)


@dataclasses.dataclass
class Answer:
    """What arrived for one rid."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    message_sizes: list[int] = dataclasses.field(default_factory=list)  # new tokens in each message
    versions: list[str] = dataclasses.field(default_factory=list)  # of the weights, of each token
    finish: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    decode_flags: int = 0
    times: RequestTimes | None = None
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    input_logprobs: InputLogprobs | None = None
    hidden_states: list[HiddenStates] = dataclasses.field(default_factory=list)
    experts: list[np.ndarray] = dataclasses.field(default_factory=list)
    pooled: np.ndarray | None = None
    stops: list[str] | None = None
    stop_patterns: list[str] | None = None
    prompt_tail: list[int] | None = None
    route: Route | None = None


class MemoryTransport:
    """The loop's Transport without sockets."""

    def __init__(self) -> None:
        self.inbox: list[Message] = []
        self.answers: dict[str, Answer] = {}
        self.replies: list[TokenizerInput] = []
        self.shut_down = False
        self.num_woken = 0
        self.profiles: list[ProfileBegan | ProfileEnded] = []
        self.may_wait: Callable[[], bool] = lambda: True  # set by the harness
        self._decode = decoder(DetokenizerInput).decode
        self._decode_reply = decoder(TokenizerInput).decode

    def wake(self) -> None:
        self.num_woken += 1

    def recv_messages(self, timeout_s: float | None) -> Sequence[Message]:
        assert timeout_s == 0 or self.may_wait(), f"the loop waits {timeout_s} s although there is work"
        messages, self.inbox = self.inbox, []
        return messages

    def send_reply(self, message: TokenizerInput) -> None:
        self.replies.append(self._decode_reply(encode(message)))

    def send_output(self, message: DetokenizerInput) -> None:
        message = self._decode(encode(message))
        if isinstance(message, ShutdownReq):
            self.shut_down = True
            return
        if isinstance(message, ProfileBegan | ProfileEnded):
            self.profiles.append(message)
            return
        count = len(message.rids)
        assert count > 0 and len(set(message.rids)) == count, f"rids {message.rids}"
        for name in ("token_counts", "prompt_tokens", "completion_tokens", "cached_tokens", "decode_flags"):
            assert len(getattr(message, name)) == count, name
        assert message.token_ids.dtype == np.int32 and int(message.token_counts.sum()) == len(message.token_ids)
        assert set(message.times) == set(message.finished)
        self._take(message)

    def _take(self, message: BatchTokenIDOut) -> None:
        ends = np.cumsum(message.token_counts)
        for i, rid in enumerate(message.rids):
            answer = self.answers.setdefault(rid, Answer())
            assert answer.finish is None, f"{rid} got another message after its end"
            assert answer.route in (None, message.route), f"{rid} has two routes"
            answer.route = message.route
            new = message.token_ids[ends[i] - message.token_counts[i] : ends[i]].tolist()
            assert (i in message.prompt_tails) == (not answer.message_sizes) or not message.prompt_tokens[i] or not new
            answer.token_ids += new
            answer.message_sizes.append(len(new))
            answer.versions += [message.weight_version] * len(new)
            answer.completion_tokens = int(message.completion_tokens[i])
            assert answer.completion_tokens == len(answer.token_ids), f"{rid}: {answer}"
            answer.prompt_tokens, answer.cached_tokens = int(message.prompt_tokens[i]), int(message.cached_tokens[i])
            answer.decode_flags = int(message.decode_flags[i])
            answer.stops = message.stops.get(i, answer.stops)
            answer.stop_patterns = message.stop_patterns.get(i, answer.stop_patterns)
            answer.prompt_tail = message.prompt_tails.get(i, answer.prompt_tail)
            if i in message.logprobs:
                assert len(message.logprobs[i].logprobs) == len(new)
                answer.logprobs.append(message.logprobs[i])
            assert i not in message.input_logprobs or answer.input_logprobs is None, f"{rid} got them twice"
            answer.input_logprobs = message.input_logprobs.get(i, answer.input_logprobs)
            if i in message.hidden_states:
                answer.hidden_states.append(message.hidden_states[i])
            if i in message.experts:
                answer.experts.append(message.experts[i])
            assert i not in message.pooled or i in message.finished, f"{rid} got vectors before its end"
            answer.pooled = message.pooled.get(i)
            answer.finish, answer.times = message.finished.get(i), message.times.get(i)


class Harness:
    def __init__(
        self,
        args: dict[str, Any] | None = None,
        *,
        overlap: bool = True,
        text_decoder: StopTextDecoder | None = None,
        step_delay_s: float = 0.0,
        nan_token: int | None = None,
        grammars: Any = None,
        processors: Any = None,
        runner: Any = None,
        server_args: ServerArgs | None = None,
        **spec: Any,
    ) -> None:
        self.args = server_args or ServerArgs(**({"random_seed": 1} | (args or {})))
        self.runner = runner or FakeRunner(fake_spec(**spec), step_delay_s=step_delay_s, nan_token=nan_token)
        self.transport = MemoryTransport()
        self.clock = Clock()
        self.scheduler = Scheduler(
            self.args,
            self.runner,
            decoder=text_decoder,
            sink=self.transport,
            grammars=grammars,
            processors=processors,
            clock=self.clock,
            wall_clock=self.clock,
            wake=self.transport.wake,
        )
        self.events: list[Sequence[KVCacheEvent]] = []  # of the prefix cache, each round's
        self.loop = SchedulerLoop(
            self.scheduler,
            self.transport,
            overlap=overlap,
            recv_interval=self.args.scheduler_recv_interval,
            publish_events=self.events.append,
        )
        self.transport.may_wait = lambda: self.scheduler.wait_s != 0
        self.sent: dict[str, TokenizedGenerateReqInput] = {}
        self.folders: dict[str, str] = {}  # by rid, of the adapters of those that have one

    def close(self) -> None:
        self.runner.close()

    # --- in

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int | None = 8,
        *,
        rid: str | None = None,
        stream: bool = False,
        return_logprob: bool = False,
        top_logprobs_num: int = 0,
        logprob_start_len: int = -1,
        token_ids_logprob: list[int] | None = None,
        return_hidden_states: bool | Literal["last"] = False,
        experts_from: int | None = None,
        priority: int | None = None,
        extra_key: str | None = None,
        lora: str | None = None,
        thinking: Thinking | None = None,
        logit_rules: LogitRules | None = None,
        embeds: np.ndarray | bool = False,
        pools: bool = False,
        route: Route = Route(),
        **sampling: Any,
    ) -> str:
        """`experts_from`: those of the prompt's tokens from there on are returned.
        `embeds`: what the prompt is given as, instead of its tokens; True: as what the fake runner takes for them."""
        rid = f"r{len(self.sent)}" if rid is None else rid
        input_embeds = embeddings_of(prompt) if embeds is True else None if embeds is False else embeds
        if input_embeds is not None:
            extra_key = f"{extra_key} {input_embeds.tobytes().hex()}"
        message = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=np.array(prompt, np.int32),
            sampling_params=SamplingParams(**({"temperature": 0.0, "max_new_tokens": max_new} | sampling)),
            stream=stream,
            return_logprob=return_logprob,
            top_logprobs_num=top_logprobs_num,
            logprob_start_len=logprob_start_len,
            token_ids_logprob=token_ids_logprob,
            return_hidden_states=return_hidden_states,
            return_routed_experts=experts_from is not None,
            routed_experts_start_len=experts_from or 0,
            pools=pools,
            priority=priority,
            extra_key=extra_key,
            lora_name=lora,
            thinking=thinking,
            logit_rules=logit_rules,
            route=route,
        )
        self.sent.setdefault(rid, message)
        if lora in self.scheduler.adapters.loaded:
            self.folders.setdefault(rid, self.scheduler.adapters.loaded[lora])
        if input_embeds is not None:
            ids = np.full(len(prompt), NO_TOKEN_ID, np.int32)
            message = msgspec.structs.replace(message, input_ids=ids, input_embeds=input_embeds)
        self.transport.inbox.append(message)
        return rid

    def pool(self, prompt: Sequence[int], **options: Any) -> str:
        """Submits a text of which a vector is wanted."""
        return self.submit(prompt, 0, pools=True, **options)

    def abort(self, rid: str = "", *, exact: bool = False, abort_all: bool = False) -> None:
        if exact:
            self.transport.inbox.append(AbortReq(rids=[rid]))
        else:
            self.control(AbortRequest(rid=rid, abort_all=abort_all))

    def control(self, request: ControlStruct) -> str:
        """Sends a control request; its id is its name."""
        name = control_of(type(request)).name
        self.transport.inbox.append(ControlRequest(request_id=name, name=name, body=pack(request)))
        return name

    def send(self, message: Message) -> None:
        self.transport.inbox.append(message)

    # --- turn

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now_s += 0.01
            self.loop.step()

    def run(self, max_turns: int = 5000) -> None:
        """Until everything is answered; then the pool must be whole."""
        for _ in range(max_turns):
            self.turn()
            if self.scheduler.is_idle and not self.transport.inbox:
                break
        else:
            raise AssertionError(f"not done after {max_turns} turns: {self.scheduler.internal_state()}")
        report = self.scheduler.cache.check()
        assert report.is_clean, report.describe()
        assert self.scheduler.load().used_tokens == 0

    # --- out

    def control_replies(self) -> list[Any]:
        """The replies to control requests so far, or their errors."""
        replies = [reply for reply in self.transport.replies if isinstance(reply, ControlReply)]
        return [reply.error or unpack(reply.body, controls()[reply.request_id].reply) for reply in replies]

    def answer(self, rid: str) -> Answer:
        return self.transport.answers[rid]

    def expected(self, rid: str, count: int | None = None) -> list[int]:
        """The tokens the request must get if nothing but eos, its stop ids or its length ends it."""
        message = self.sent[rid]
        sampling = message.sampling_params
        room = min(self.runner.spec.context_len, self.runner.spec.max_sequence_tokens + 1) - len(message.input_ids)
        most = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.runner.spec.eos_token_ids))
        seed = 0 if sampling.is_greedy else sampling.sampling_seed
        assert seed is not None, "give a seed to requests that are compared"
        return self.runner.expected_tokens(
            message.input_ids.tolist(),
            most if count is None else count,
            seed=seed,
            stop_ids=stops,
            adapter=self.folders.get(rid),
        )

    def expected_vectors(self, rid: str) -> list[list[float]]:
        ids = self.sent[rid].input_ids.tolist()
        found: list[list[float]] = self.runner.expected_vectors(ids, adapter=self.folders.get(rid))
        return found

    def assert_as_expected(self, *rids: str) -> None:
        """Named requests, or all, ended normally with the oracle's tokens."""
        for rid in rids or tuple(self.sent):
            answer = self.answer(rid)
            assert answer.finish is not None and answer.finish.type != "abort", f"{rid}: {answer.finish}"
            assert answer.token_ids == self.expected(rid), f"{rid}: {answer.token_ids} instead of {self.expected(rid)}"
            assert answer.prompt_tokens == len(self.sent[rid].input_ids)
            assert (answer.pooled is None) != self.sent[rid].pools, f"{rid}: {answer}"
            if answer.pooled is not None:
                assert answer.pooled.dtype == np.float32 and answer.pooled.tolist() == self.expected_vectors(rid), (
                    f"{rid}: {answer}"
                )

    @property
    def steps(self) -> list[StepInput]:
        return self.runner.steps

    @property
    def modes(self) -> list[ForwardMode]:
        return [step.mode for step in self.steps]

    def prefill_lens(self) -> list[list[int]]:
        """Prompt tokens per request, for each step that had any."""
        return [s.extend_lens[s.num_decode_rows :].tolist() for s in self.steps if s.mode is not ForwardMode.DECODE]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, never eos."""
    return np.random.default_rng([length, seed]).integers(1, 101, length).tolist()


def until_replied(harness: Harness, count: int = 1) -> Any:
    """Commands take real time, in a thread."""
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        harness.turn()
        if len(harness.control_replies()) >= count:
            return harness.control_replies()[-1]
        time.sleep(0.001)
    raise AssertionError("no reply")
