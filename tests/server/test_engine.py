"""The Engine: SGLang's arguments and results, from threads and loops, over real worker processes."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fake_scheduler
import numpy as np
import psutil
import pytest

import jaxserve
from jaxserve.demo import demo_model_path
from jaxserve.server.engine import Engine, EngineError
from jaxserve.server.requests import RequestError

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def new_engine(**options: Any) -> Engine:
    return Engine(demo_model_path(), worker_commands=fake_scheduler.commands(), **options)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with new_engine(weight_version="v7") as engine:
        yield engine


def test_what_programs_ask_the_tokenizer_manager(engine: Engine) -> None:
    manager = engine.tokenizer_manager
    assert manager.tokenizer.decode(manager.tokenizer.encode("Hello")) == "Hello"
    assert (manager.model_path, manager.served_model_name) == (engine.server_args.model_path,) * 2
    assert manager.server_args is engine.server_args
    assert manager.context_len == fake_scheduler.CONTEXT_LEN
    assert manager.model_config.vocab_size == fake_scheduler.VOCAB_SIZE
    replies: Any = engine.generate(
        input_ids=[5], sampling_params={**GREEDY, "max_new_tokens": None}, rid="long-running", stream=True
    )
    parts = [next(replies)]
    manager.abort_request(rid="long")
    parts += replies
    last = parts[-1]
    assert last["meta_info"]["finish_reason"]["type"] in ("abort", "length")


def test_an_engine_without_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    options = {"skip_tokenizer_init": True, "worker_commands": fake_scheduler.commands()}
    with new_engine() as usual, Engine(str(folder), **options) as engine:  # which has no tokenizer
        assert engine.tokenizer is None
        wanted: Any = usual.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, return_logprob=True)
        reply: Any = engine.generate(input_ids=[5, 6, 7], sampling_params=GREEDY, return_logprob=True)
        assert (reply["text"], reply["output_ids"]) == ("", wanted["output_ids"])
        assert reply["meta_info"]["output_token_logprobs"] == wanted["meta_info"]["output_token_logprobs"]
        streamed: list[Any] = list(engine.generate(input_ids=[[5], [6]], sampling_params=GREEDY, stream=True))
        assert sorted(one["index"] for one in streamed if one["meta_info"]["finish_reason"]) == [0, 1]
        stop_token = reply["output_ids"][2]
        stopped: Any = engine.generate(input_ids=[5, 6, 7], sampling_params={**GREEDY, "stop_token_ids": [stop_token]})
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop_token}
        for wrong in (
            {"sampling_params": {"stop": "x"}},
            {"sampling_params": {"stop_regex": "x"}},
            {"sampling_params": {"regex": "x"}},
            {"return_text_in_logprobs": True},
        ):
            name = next(iter(wrong.get("sampling_params", wrong)))
            with pytest.raises(RequestError, match=f"^{name} needs a tokenizer, and this server runs without one"):
                engine.generate(input_ids=[5], **wrong)
        with pytest.raises(RequestError, match=r"^A text needs a tokenizer, and .* send input_ids") as caught:
            engine.generate("Hello")
        assert caught.value.status_code == 400


def test_arguments_at_sglangs_positions(engine: Engine) -> None:
    parameters = list(inspect.signature(Engine.generate).parameters)
    assert parameters[:4] == ["self", "prompt", "sampling_params", "input_ids"]
    nothing = [None] * 5
    reply: Any = engine.generate("Hello", GREEDY, None, *nothing, True, -1, 2)
    assert len(reply["meta_info"]["output_top_logprobs"][0]) == 2
    with pytest.raises(TypeError, match="generate got return_logprob twice"):
        engine.generate("Hello", GREEDY, None, *nothing, True, return_logprob=True)
    with pytest.raises(TypeError, match="generate takes at most"):
        engine.generate(*[None] * 60)
    with pytest.raises(RequestError, match="image_data"):
        engine.generate("Hello", GREEDY, None, "picture.png")


def test_a_refused_request_is_a_value_error_as_sglangs(engine: Engine) -> None:
    with pytest.raises(ValueError, match="temperature must be non-negative"):
        engine.generate("Hello", {"temperature": -1})


def test_what_an_engine_says_of_itself(engine: Engine) -> None:
    assert engine.get_model_info()["weight_version"] == "v7"
    info = engine.get_server_info()
    assert (info["version"], info["weight_version"]) == (jaxserve.__version__, "v7")
    assert len(engine.get_all_child_pids()) == 2


def test_names_of_the_package() -> None:
    assert jaxserve.Engine is Engine
    assert jaxserve.SamplingParams().max_new_tokens == 128
    assert jaxserve.ServerArgs(model_path="m").model_path == "m"
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = jaxserve.Motor


def test_a_reply_has_sglangs_shape(engine: Engine) -> None:
    reply = engine.generate("Hello", GREEDY, rid="mine")
    assert isinstance(reply, dict)
    assert set(reply) == {"text", "output_ids", "meta_info"}
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["completion_tokens"], meta["weight_version"]) == (6, "v7")
    assert meta["e2e_latency"] > 0
    assert reply["text"] == engine.tokenizer.decode(reply["output_ids"])


def test_lists_and_samples_give_lists(engine: Engine) -> None:
    replies = engine.generate(["a", "b"], GREEDY)
    assert isinstance(replies, list)
    assert [r["text"] for r in replies] == [engine.generate(p, GREEDY)["text"] for p in ("a", "b")]  # type: ignore[call-overload]
    assert len(engine.generate("a", {"n": 3, "max_new_tokens": 2})) == 3
    mixed = engine.generate(["a", "b"], [{"max_new_tokens": 1}, {"max_new_tokens": 3}])
    assert [r["meta_info"]["completion_tokens"] for r in mixed] == [1, 3]  # type: ignore[index]
    by_ids = engine.generate(input_ids=engine.tokenizer.encode("a"), sampling_params=GREEDY)
    assert by_ids["text"] == replies[0]["text"]  # type: ignore[index,call-overload]


def test_streams_are_cumulative_and_end_early_without_a_trace(engine: Engine) -> None:
    replies = list(engine.generate("Hello", GREEDY, stream=True))
    whole = engine.generate("Hello", GREEDY)
    assert replies[-1]["text"] == whole["text"]  # type: ignore[index,call-overload]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(replies))  # type: ignore[index]
    stream = engine.generate("Hello", {**GREEDY, "max_new_tokens": 400}, stream=True)
    next(stream)  # type: ignore[call-overload]
    stream.close()  # type: ignore[union-attr]
    wait_until_idle(engine)


def wait_until_idle(engine: Engine) -> None:
    deadline_s = time.monotonic() + 10
    while engine.num_live:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_stream_that_is_read_slowly_is_merged(engine: Engine) -> None:
    stream: Any = engine.generate("Hello", {**GREEDY, "max_new_tokens": 60}, stream=True)
    replies = [next(stream)]
    wait_until_idle(engine)
    replies += stream
    assert len(replies) <= 3, "what came meanwhile is one reply"
    whole: Any = engine.generate("Hello", {**GREEDY, "max_new_tokens": 60})
    assert replies[-1]["output_ids"] == whole["output_ids"]
    assert replies[-1]["text"] == whole["text"]
    assert replies[-1]["text"].startswith(replies[0]["text"])
    assert replies[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 60}


async def test_an_async_stream_that_is_read_slowly_is_merged(engine: Engine) -> None:
    stream: Any = await engine.async_generate("Hello", {**GREEDY, "max_new_tokens": 60}, stream=True)
    replies = [await anext(stream)]
    await asyncio.to_thread(wait_until_idle, engine)
    replies += [reply async for reply in stream]
    assert len(replies) <= 3
    assert len(replies[-1]["output_ids"]) == 60


def test_logprobs_with_text(engine: Engine) -> None:
    reply: Any = engine.generate("x", GREEDY, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in entries] == reply["output_ids"]
    assert entries[0][2] == engine.tokenizer.decode([entries[0][1]])
    assert [len(top) for top in reply["meta_info"]["output_top_logprobs"]] == [2] * 6


async def test_async_calls_from_another_loop(engine: Engine) -> None:
    replies = await asyncio.gather(*(engine.async_generate(f"prompt {i}", GREEDY) for i in range(10)))
    assert len({r["text"] for r in replies}) > 1  # type: ignore[index,call-overload]
    stream: Any = await engine.async_generate("Hello", GREEDY, stream=True)
    texts = [reply["text"] async for reply in stream]
    assert texts[-1] == (await engine.async_generate("Hello", GREEDY))["text"]  # type: ignore[index,call-overload]
    task = asyncio.create_task(engine.async_generate("Hello", {**GREEDY, "max_new_tokens": 400}))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(wait_until_idle, engine)


def test_many_threads(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies: list[Any] = list(pool.map(lambda i: engine.generate(f"thread {i}", GREEDY), range(40)))
    assert all(len(reply["output_ids"]) == 6 for reply in replies)


def test_bad_requests_raise_with_a_sentence(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"sampling_params has no field 'tempreature'"):
        engine.generate("a", {"tempreature": 1})
    with pytest.raises(RequestError, match="Exactly one of text, input_ids and input_embeds"):
        engine.generate()
    with pytest.raises(RequestError, match="temperature must be"):
        list(engine.generate("a", {"temperature": -1}, stream=True))


def test_control(engine: Engine) -> None:
    assert engine.flush_cache().success
    info = engine.get_server_info()
    assert info["weight_version"] == "v7"
    assert info["scheduler"]["context_len"] == 512
    assert info["internal_states"][0]["num_running_reqs"] == 0
    thread = threading.Timer(0.05, engine.abort_request, kwargs={"abort_all": True})
    thread.start()
    reply: Any = engine.generate("a", {**GREEDY, "max_new_tokens": 480})
    thread.join()
    assert reply["meta_info"]["finish_reason"]["type"] in ("abort", "length")


def test_pause_and_the_other_control_methods(engine: Engine) -> None:
    stream: Any = engine.generate("Hello", {**GREEDY, "max_new_tokens": 100}, stream=True)
    parts = [next(stream)]
    assert engine.pause_generation("retract").status == "ok"
    assert engine.flush_cache().success
    assert engine.get_internal_state().internal_state["is_paused"]
    assert engine.continue_generation().message == "Generation continued successfully."
    parts += list(stream)
    assert parts[-1]["output_ids"] == engine.generate("Hello", {**GREEDY, "max_new_tokens": 100})["output_ids"]  # type: ignore[index,call-overload]
    assert engine.set_internal_state({"decode_log_interval": 50}).updated
    assert engine.slow_down(0.0).forward_sleep_time is None
    with pytest.raises(RequestError, match="flush_cache is wrong"):
        engine.flush_cache(timeout_s=-1)


def test_a_weight_update_is_a_tuple_as_well() -> None:
    with new_engine() as engine:
        success, message, num_paused = result = engine.update_weights_from_disk("new")
        assert (success, num_paused) == (True, 0) and result.message == message == "The weights are those of new now."
        assert engine.update_weight_version("v2").new_version == "v2"
        assert engine.get_model_info()["weight_version"] == "v2"
        assert engine.generate("a", GREEDY)["meta_info"]["weight_version"] == "v2"  # type: ignore[index,call-overload]


def test_weights_as_tensors() -> None:
    with new_engine() as engine:
        assert engine.update_weights_from_tensor({"a": np.zeros(2)}, weight_version="v2") == (True, "The weights are replaced.")
        assert engine.get_model_info()["weight_version"] == "v2"
        assert engine.begin_weight_update() == (True, "The update of weights has begun.")
        assert engine.update_weights_from_tensor([("a", np.zeros(2))], None, False, weight_version="v3")[0]
        assert engine.get_model_info()["weight_version"] == "v2"
        assert engine.end_weight_update() == (True, "The weights are replaced.")
        assert engine.generate("a", GREEDY)["meta_info"]["weight_version"] == "v3"  # type: ignore[index,call-overload]


def test_two_engines_and_a_thread_that_ends() -> None:
    """Workers belong to the Engine, not to the thread that made it."""
    made: list[Engine] = []
    threads = [threading.Thread(target=lambda: made.append(new_engine())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = [pid for one in made for pid in one._pipeline.workers.pids().values()]
    texts = [one.generate("Hello", GREEDY)["text"] for one in made]  # type: ignore[index,call-overload]
    assert texts[0] == texts[1]
    made[0].shutdown()
    assert made[1].generate("Hello", GREEDY)["text"] == texts[1]  # type: ignore[index,call-overload]
    made[1].shutdown()
    made[1].shutdown()
    with pytest.raises(EngineError, match="has been shut down"):
        made[1].generate("Hello")
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_SCHEDULER", "crash")
    with pytest.raises(EngineError, match="the device is on fire"):
        new_engine()
    monkeypatch.setenv("FAKE_SCHEDULER", "user_error")
    with pytest.raises(ValueError, match="'nowhere' does not exist"):
        new_engine()
    with pytest.raises(ValueError, match="model folder 'nowhere' does not exist"):
        Engine("nowhere", worker_commands=fake_scheduler.commands())
    with pytest.raises(ValueError, match="either server_args or single options"):
        Engine("m", server_args=jaxserve.ServerArgs(model_path="m"))
    with pytest.raises(ValueError, match=r"There is no option tensor_paralel_size\. Did you mean tensor_parallel_size\?"):
        Engine("m", tensor_paralel_size=2)


def test_options_have_the_command_lines_other_names() -> None:
    with Engine(model=demo_model_path(), tensor_parallel_size=1, worker_commands=fake_scheduler.commands()) as engine:
        assert (engine.server_args.model_path, engine.server_args.tp_size) == (demo_model_path(), 1)


def test_a_worker_that_dies_is_explained_to_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's clients read one sentence; who runs an Engine reads the reason."""
    monkeypatch.setenv("FAKE_SCHEDULER", "exit_step")
    reason = r"ended with exit status 3\. Its last output:\n(.*\n)*what others asked for"
    with new_engine() as engine:
        with pytest.raises(EngineError, match=reason):
            list(engine.generate("Hello", {"max_new_tokens": 400, "ignore_eos": True}, stream=True))
        with pytest.raises(EngineError, match=reason):
            engine.generate("Hello", GREEDY)


def test_a_program_that_just_ends_leaves_nothing(tmp_path: Path) -> None:
    """No shutdown(), no main guard, an exception at the end."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            import fake_scheduler, jaxserve
            engine = jaxserve.Engine({demo_model_path()!r}, worker_commands=fake_scheduler.commands())
            print(*engine._pipeline.workers.pids().values(), engine._pipeline.folder, flush=True)
            engine.generate("Hello", {{"max_new_tokens": 2}})
            raise SystemExit(5)
            """
        )
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 5, done.stderr
    *pids, folder = done.stdout.split()
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(int(pid))]
    assert not Path(folder).exists()
    assert "Traceback" not in done.stderr
