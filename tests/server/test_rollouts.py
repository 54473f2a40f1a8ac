"""Rollouts: what Engine.rollout gives is what Engine.generate gives, as padded arrays; over real worker processes."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_scheduler
import numpy as np
import pytest

from jaxserve.demo import demo_model_path
from jaxserve.messages import TokenLogprobs
from jaxserve.server.engine import Engine, EngineError
from jaxserve.server.requests import GenerateReqInput, GenerationChunk, RequestError, TokenPart
from jaxserve.server.rollouts import RolloutJob, Rollouts, RolloutSink
from jaxserve.types import FinishReason, SamplingParams

PROMPTS = ["Hello", "What is the capital of France?", "A"]
PAD = 2042  # of the demo tokenizer
LONG = {"max_new_tokens": None, "ignore_eos": True}


def params(*max_new_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"temperature": 0, "ignore_eos": True, "max_new_tokens": most, **fields} for most in max_new_tokens]


def new_engine(**options: Any) -> Engine:
    return Engine(demo_model_path(), worker_commands=fake_scheduler.commands(), **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with new_engine(weight_version="v7") as engine:
        yield engine


@pytest.fixture(scope="module")
def slow_engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.01")
        with new_engine() as engine:
            yield engine


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)


def rows_of(rollouts: Rollouts) -> list[tuple[list[int], list[float], str, str]]:
    """Tokens, logprobs, text and end of each row; what lies behind is padding."""
    assert rollouts.logprobs is not None
    mask = rollouts.mask
    assert (rollouts.tokens[~mask] == rollouts.pad_token_id).all() and not rollouts.logprobs[~mask].any()
    return [
        (tokens[:length].tolist(), logprobs[:length].tolist(), text, reason)
        for tokens, logprobs, length, text, reason in zip(
            rollouts.tokens, rollouts.logprobs, rollouts.lengths.tolist(), rollouts.texts, rollouts.finish_reasons, strict=True
        )
    ]


def rows_of_replies(replies: list[dict[str, Any]]) -> list[tuple[list[int], list[float], str, str]]:
    return [
        (
            reply["output_ids"],
            [logprob for logprob, _, _ in reply["meta_info"]["output_token_logprobs"]],
            reply["text"],
            reply["meta_info"]["finish_reason"]["type"],
        )
        for reply in replies
    ]


def test_it_is_what_generate_gives(engine: Engine) -> None:
    """Of several lengths, longer than what one message brings, and ended by a token of their own."""
    asked = params(130, 7, 40, n=2)
    stop: Any = engine.generate(PROMPTS[1], params(7)[0])
    asked[1]["stop_token_ids"] = [stop["output_ids"][4]]
    replies: Any = engine.generate(PROMPTS, asked, return_logprob=True)
    rollouts = engine.rollout(PROMPTS, asked)
    assert rows_of(rollouts) == rows_of_replies(replies)
    assert rollouts.finish_reasons == ["length", "length", "stop", "stop", "length", "length"]
    assert rollouts.tokens.shape == (6, 130) and len(rollouts) == 6
    assert rollouts.weight_versions == ["v7"] * 6
    assert (rollouts.num_prompts, rollouts.num_samples, rollouts.pad_token_id) == (3, 2, PAD)
    dtypes = [rollouts.tokens.dtype, rollouts.lengths.dtype, rollouts.prompt_tokens.dtype, rollouts.prompt_lengths.dtype]
    assert dtypes == [np.int32] * 4 and rollouts.finishes.dtype == np.int8
    assert rollouts.logprobs is not None and rollouts.logprobs.dtype == np.float32


def test_prompts_are_padded_on_the_left(engine: Engine) -> None:
    prompts = [[5, 6, 7], np.array([8]), [9, 10]]
    rollouts = engine.rollout(input_ids=prompts, sampling_params=params(2)[0], n=2, pad_token_id=-1)
    assert rollouts.prompt_tokens.tolist() == [[5, 6, 7], [-1, -1, 8], [-1, 9, 10]]
    assert rollouts.prompt_lengths.tolist() == [3, 1, 2]
    assert rollouts.prompt_mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert rollouts.sequences.tolist()[2:4] == [[-1, -1, 8, *tokens] for tokens in rollouts.tokens[2:4].tolist()]
    assert engine.rollout(input_ids=[5, 6]).prompt_tokens.tolist() == [[5, 6]]  # one prompt


def test_widths_are_as_wanted(engine: Engine) -> None:
    widths: Any = {"max_len": 12, "max_prompt_len": 9}
    for prompts, asked in ((PROMPTS, params(3, 12, 5)), (PROMPTS[:1], params(4)[0])):
        rollouts = engine.rollout(prompts, asked, **widths)
        assert (rollouts.tokens.shape[1], rollouts.prompt_tokens.shape[1]) == (12, 9)
        assert rows_of(rollouts) == rows_of(engine.rollout(prompts, asked))
    as_long_as_can_be = {"max_new_tokens": None, "ignore_eos": True}
    assert engine.rollout("A", as_long_as_can_be, max_len=20).lengths.tolist() == [20]
    context_len = fake_scheduler.CONTEXT_LEN
    near_the_end = engine.rollout(input_ids=[5] * (context_len - 4), sampling_params=as_long_as_can_be, max_len=20)
    assert near_the_end.lengths.tolist() == [4]
    assert engine.rollout(PROMPTS, params(0)[0]).tokens.shape == (3, 0)


def test_logprobs_are_left_out(engine: Engine) -> None:
    rollouts = engine.rollout(PROMPTS, params(4)[0], logprobs=False)
    assert rollouts.logprobs is None
    assert rollouts.tokens.tolist() == engine.rollout(PROMPTS, params(4)[0]).tokens.tolist()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_len": 3}, "max_new_tokens may be at most max_len, 3, got 6."),
        ({"max_len": 0}, "max_len must be at least 1, got 0."),
        ({"max_prompt_len": 2}, "A prompt may have at most max_prompt_len, 2, tokens; one has 8."),
        ({"max_prompt_len": "2"}, "max_prompt_len must be an integer, got a string."),
        ({"n": 0}, "n must be"),
        ({"n": 1.5}, "n must be an integer, got a number."),
        ({"pad_token_id": "x"}, "pad_token_id must be an integer, got a string."),
        ({"lora_path": "a"}, "lora_path is not available"),
        ({"input_ids": [5]}, "Exactly one of text, input_ids and input_embeds must be given."),
        ({"sampling_params": params(6) * 2}, "sampling_params must have one entry per prompt: got 2 for 3 prompts."),
    ],
)
def test_what_is_refused(engine: Engine, asked: dict[str, Any], sentence: str) -> None:
    fields = {"sampling_params": params(6)[0], **asked}
    with pytest.raises(RequestError, match=f"^{sentence}"):
        engine.rollout(PROMPTS, **fields)
    with pytest.raises(RequestError, match=f"^{sentence}"):
        next(engine.iter_rollouts(PROMPTS, **fields))
    until(lambda: not engine.num_live)


def test_an_option_that_does_not_exist(engine: Engine) -> None:
    with pytest.raises(TypeError, match="colour"):
        engine.rollout("A", colour="red")  # type: ignore[call-arg]


def test_prompts_come_as_they_end(slow_engine: Engine) -> None:
    """The short one first, although it is the last; together they are the whole."""
    asked, seen = params(60, 30, 2), []
    whole = rows_of(slow_engine.rollout(PROMPTS, asked, n=3))
    for prompt, group in slow_engine.iter_rollouts(PROMPTS, asked, n=3):
        seen.append(prompt)
        assert rows_of(group) == whole[3 * prompt : 3 * prompt + 3]
        assert group.prompt_tokens.shape == (1, group.prompt_lengths[0])
    assert seen == [2, 1, 0]


async def test_async_forms(slow_engine: Engine) -> None:
    asked = params(20, 10, 2)
    whole = await slow_engine.async_rollout(PROMPTS, asked, max_len=25)
    seen = []
    async for prompt, group in slow_engine.async_iter_rollouts(PROMPTS, asked, max_len=25):
        seen.append(prompt)
        assert group.tokens.tolist() == whole.tokens[prompt : prompt + 1].tolist()
    assert seen == [2, 1, 0]
    with pytest.raises(RequestError, match="max_prompt_len"):
        await anext(aiter(slow_engine.async_iter_rollouts(PROMPTS, asked, max_prompt_len=1)))


async def test_leaving_early_aborts(slow_engine: Engine) -> None:
    groups = slow_engine.iter_rollouts(PROMPTS, [*params(400, 400), *params(2)])
    assert next(groups)[0] == 2
    groups.close()  # type: ignore[attr-defined]
    until(lambda: not slow_engine.num_live)
    later: Any = slow_engine.async_iter_rollouts(PROMPTS, [*params(400, 400), *params(2)])
    assert (await anext(later))[0] == 2
    await later.aclose()
    until(lambda: not slow_engine.num_live)
    task = asyncio.create_task(slow_engine.async_rollout("A", LONG))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    until(lambda: not slow_engine.num_live)


def test_what_is_aborted_keeps_what_it_has(slow_engine: Engine) -> None:
    timer = threading.Timer(0.5, lambda: slow_engine.abort_request(abort_all=True))
    timer.start()
    rollouts = slow_engine.rollout(PROMPTS, [*params(400, 400), *params(1)])
    timer.join()
    assert rollouts.finish_reasons == ["abort", "abort", "length"]
    assert (rollouts.lengths[:2] > 1).all() and (rollouts.lengths[:2] < 400).all()
    assert [len(row) for row, *_ in rows_of(rollouts)] == rollouts.lengths.tolist()


def test_an_engine_that_ends_aborts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_STEP_S", "0.01")
        engine = new_engine()
    timer = threading.Timer(0.3, engine.shutdown)
    timer.start()
    assert engine.rollout("A", LONG, n=2).finish_reasons == ["abort", "abort"]
    timer.join()
    with pytest.raises(EngineError, match="has been shut down"):
        engine.rollout("A", LONG)


def test_without_a_tokenizer(tmp_path: Path, engine: Engine) -> None:
    (tmp_path / "config.json").write_text("{}")
    asked = params(5)[0]
    with Engine(str(tmp_path), skip_tokenizer_init=True, worker_commands=fake_scheduler.commands()) as plain:
        rollouts = plain.rollout(input_ids=[[5, 6], [7]], sampling_params=asked)
        assert rollouts.texts == ["", ""] and rollouts.pad_token_id == 0
        wanted = engine.rollout(input_ids=[[5, 6], [7]], sampling_params=asked)
        assert rollouts.tokens.tolist() == wanted.tokens.tolist()
        assert rollouts.prompt_tokens.tolist() == [[5, 6], [0, 7]]


def test_thousands_at_once_with_a_bar(
    engine: Engine, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXSERVE_TERMINAL_COLUMNS", "60")
    prompts = [[5 + i % 2000, 6 + i % 7] for i in range(1000)]
    rollouts = engine.rollout(input_ids=prompts, sampling_params=params(3)[0], n=3, progress=True)
    assert rollouts.tokens.shape == (3000, 3) and (rollouts.lengths == 3).all()
    assert (rollouts.tokens[0::3] == rollouts.tokens[2::3]).all()
    few = engine.rollout(input_ids=prompts[500:502], sampling_params=params(3)[0])
    assert rollouts.tokens[1500:1506:3].tolist() == few.tokens.tolist()
    assert "Rolling out" in capfd.readouterr().err


def test_a_journal_sees_the_tokens(tmp_path: Path) -> None:
    target = tmp_path / "log"
    with new_engine(log_requests=True, log_requests_level=3, log_requests_target=(str(target),)) as engine:
        rollouts = engine.rollout("Hello", params(4)[0])
    log = "".join(file.read_text() for file in target.iterdir())
    assert json.dumps(rollouts.tokens[0].tolist()) in log


# --- the sink, with chunks made by hand


def job(num_prompts: int, n: int) -> RolloutJob:
    params = SamplingParams(n=n)
    req = GenerateReqInput(input_ids=[[1]] * num_prompts, sampling_params=[params] * num_prompts)
    req.prompt_ids = [np.full(1, prompt, np.int32) for prompt in range(num_prompts)]
    return RolloutJob(req, pad_token_id=0)


def chunk(index: int, tokens: list[int], reason: FinishReason | None = None) -> GenerationChunk:
    logprobs = TokenLogprobs(logprobs=np.array(tokens, np.float32))
    parts = [TokenPart(np.array(tokens, np.int32), logprobs)]
    return GenerationChunk(index, f"r{index}", "x", [], [], 1, len(tokens), 0, reason, parts=parts)


def sink_of(job: RolloutJob) -> tuple[RolloutSink, list[int]]:
    groups: list[int] = []
    return job.sink(on_row=lambda: None, on_group=groups.append), groups


def test_a_group_is_told_of_once_when_it_is_whole() -> None:
    two = job(2, 2)
    sink, groups = sink_of(two)
    end = FinishReason.length_limit(2)
    for index in (0, 3, 1):
        sink.push(chunk(index, [index]))
    for index in (3, 0):
        sink.push(chunk(index, [7], end))
    assert groups == [] and not sink.is_over
    sink.push(chunk(2, [2, 8], end))
    assert groups == [1] and not sink.is_over
    sink.push(chunk(1, [], end))
    assert groups == [1, 0] and sink.is_over
    whole = two.rollouts(sink, two.prompts)
    assert whole.tokens.tolist() == [[0, 7], [1, 0], [2, 8], [3, 7]]
    assert whole.lengths.tolist() == [2, 1, 2, 2]
    assert whole.texts == ["xx", "xx", "x", "xx"]


def test_one_failure_ends_it() -> None:
    sink, groups = sink_of(job(2, 2))
    sink.push(chunk(0, [1], FinishReason.abort("nothing is asked for")))  # somebody did: an end like any other
    assert not sink.is_over
    sink.push(chunk(2, [], FinishReason.abort("no memory", 500)))
    assert sink.is_over and groups == [1]
    with pytest.raises(RequestError, match="no memory") as raised:
        sink.check()
    assert raised.value.status_code == 500
    sink.push(chunk(3, [1], FinishReason.abort("no memory", 500)))
    assert groups == [1]
