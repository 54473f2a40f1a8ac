"""Engines inside of this process, on devices that it holds, as a training program has them: real models, real threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import make_checkpoint
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from jaxserve import Engine, WeightSender
from jaxserve.server.engine import EngineError
from jaxserve.server.requests import RequestError

PROMPTS = [[3 + (seed * 31 + i * 7) % 290 for i in range(6 + 5 * seed)] for seed in range(6)]
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
Weights = dict[str, jax.Array]
OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)


@pytest.fixture(scope="module")
def folders(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one model."""
    return {"old": checkpoint("qwen3"), "new": make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)}


@pytest.fixture(scope="module")
def start(folders: dict[str, Path], compilation_cache: str) -> Callable[..., Engine]:
    def make(folder: str = "old", **options: Any) -> Engine:
        defaults = {
            "in_process": True,
            "weight_version": folder,
            "max_running_requests": 4,
            "chunked_prefill_size": 64,
            "page_size": 16,
            "max_total_tokens": 2048,
            "decode_row_buckets": (4,),
            "compilation_cache_dir": compilation_cache,
            "skip_tokenizer_init": True,
        }
        return Engine(str(folders[folder]), **{**defaults, **options})

    return make


@pytest.fixture(scope="module")
def trained(folders: dict[str, Path]) -> dict[str, Weights]:
    """As a trainer on four devices has them, sharded in its own way."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "model"))

    def put(array: np.ndarray) -> jax.Array:
        spec = PartitionSpec(*("fsdp" if size % 2 == 0 else None for size in array.shape[:1]))
        return jax.device_put(array, NamedSharding(mesh, spec))

    return {name: {k: put(v) for k, v in load_file(folder / "model.safetensors").items()} for name, folder in folders.items()}


def tokens_of(engine: Engine) -> list[list[int]]:
    replies = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    assert isinstance(replies, list)
    return [reply["output_ids"] for reply in replies]


@pytest.fixture(scope="module")
def expected(start: Callable[..., Engine]) -> dict[str, list[list[int]]]:
    """What engines that begin with those weights answer."""
    found = {}
    for name in ("old", "new"):
        with start(name, devices=jax.devices()[4:5]) as engine:
            found[name] = tokens_of(engine)
    assert found["old"] != found["new"]
    return found


@pytest.fixture(scope="module")
def handlers() -> list[Any]:
    """Of signals, before there is an engine."""
    return [signal.getsignal(number) for number in OWN_SIGNALS]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine], handlers: list[Any]) -> Iterator[Engine]:
    """Beside the trainer's devices."""
    with start(devices=jax.devices()[4 : 4 + request.param]) as running:
        yield running


Expected = dict[str, list[list[int]]]


def test_signals_are_the_programs(engine: Engine, handlers: list[Any]) -> None:
    assert [signal.getsignal(number) for number in OWN_SIGNALS] == handlers


def test_after_an_update_all_is_as_with_a_fresh_engine(engine: Engine, trained: dict[str, Weights], expected: Expected) -> None:
    for name in ("new", "old", "new", "old"):
        assert engine.update_weights(trained[name], weight_version=name) == name
        assert tokens_of(engine) == expected[name]
        reply = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        assert isinstance(reply, dict) and reply["meta_info"]["weight_version"] == name
        assert engine.get_model_info()["weight_version"] == name


def test_five_hundred_updates_compile_nothing_and_leave_nothing(
    engine: Engine, trained: dict[str, Weights], expected: Expected
) -> None:
    for name in ("new", "old"):
        engine.update_weights(trained[name])
    before = _arrays_of_engine(), _compilations(engine)
    for i in range(500):
        name = ("new", "old")[i % 2]
        engine.update_weights(trained[name])
        if i % 50 in (0, 49):
            assert tokens_of(engine) == expected[name]
    assert (_arrays_of_engine(), _compilations(engine)) == before


def _arrays_of_engine() -> int:
    """On the devices that engines of these tests have, without what is garbage, of other tests perhaps."""
    gc.collect()
    theirs = set(jax.devices()[4:])
    return sum(array.devices() <= theirs for array in jax.live_arrays())


def _compilations(engine: Engine) -> int:
    state = engine.get_server_info()["internal_states"][0]
    number: int = state["runner"]["compiles_total"]
    return number


def test_a_trainer_may_donate_what_it_has_handed_over(engine: Engine, trained: dict[str, Weights], expected: Expected) -> None:
    sharding = NamedSharding(Mesh(np.array(jax.devices()[4:5]), ("x",)), PartitionSpec())
    here = {name: jax.device_put(np.asarray(array), sharding) for name, array in trained["new"].items()}
    engine.update_weights(here)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)
    jax.block_until_ready(step(here))
    assert tokens_of(engine) == expected["new"]
    with pytest.raises(ValueError, match=r"Deleted arrays, as donated ones are: lm_head.weight|Deleted arrays"):
        engine.update_weights(here)
    assert tokens_of(engine) == expected["new"]
    engine.update_weights(trained["old"])


def test_wrong_trees_are_refused_by_name_and_change_nothing(
    engine: Engine, trained: dict[str, Weights], expected: Expected
) -> None:
    engine.update_weights(trained["old"])
    new = trained["new"]
    norm, q = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({name: array for name, array in new.items() if name != norm}, {}, norm),
        ({**new, "model.norm.wait": new[norm]}, {}, "model.norm.wait"),
        ({**new, norm: new[norm][:-1]}, {}, norm),
        ({**new, norm: new[norm].astype(jnp.int32)}, {}, norm),
        ({**new, norm: "no array"}, {}, norm),
        ({q: new[q]}, {"partial": True}, q),
        ({}, {}, norm),
        (new, {"mapping": {"model.norm.wait": norm}}, "model.norm.wait"),
    ]
    for tree, options, name in cases:
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            engine.update_weights(tree, **options)
    assert tokens_of(engine) == expected["old"]


def test_a_part_of_the_weights(engine: Engine, trained: dict[str, Weights], expected: Expected) -> None:
    engine.update_weights(trained["old"])
    layers = {name: array for name, array in trained["new"].items() if ".layers." in name}
    others = {name: array for name, array in trained["new"].items() if ".layers." not in name}
    engine.update_weights(layers, partial=True)
    assert tokens_of(engine) not in (expected["old"], expected["new"])
    engine.update_weights(others, partial=True)
    assert tokens_of(engine) == expected["new"]
    engine.update_weights(trained["old"])


def test_running_requests_go_on_with_new_weights(engine: Engine, trained: dict[str, Weights]) -> None:
    """Paused in place, their weights changed, with what the old ones computed; and computed again."""
    for mode, flush_cache in (("in_place", False), ("retract", True)):
        engine.update_weights(trained["old"], weight_version="old")
        params = {**GREEDY, "max_new_tokens": 400, "stream_interval": 1}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(engine.rollout, input_ids=PROMPTS[:3], sampling_params=params)
            _until(lambda: engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 3)
            engine.pause_generation(mode=mode)
            engine.update_weights(trained["new"], weight_version="new", flush_cache=flush_cache)
            engine.continue_generation()
            rollouts = waiting.result(60)
        assert rollouts.lengths.tolist() == [400] * 3
        for row in range(3):
            versions = [rollouts.versions[i] for i in rollouts.token_versions[row].tolist()]
            assert versions == sorted(versions, reverse=True) and versions[0] == "old" and versions[-1] == "new"


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.002)


def test_an_update_while_paused_in_place_needs_a_decision(engine: Engine, trained: dict[str, Weights]) -> None:
    params = {**GREEDY, "max_new_tokens": 200}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.generate, input_ids=PROMPTS[0], sampling_params=params)
        _until(lambda: engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 1)
        engine.pause_generation(mode="in_place")
        with pytest.raises(ValueError, match="1 requests are paused in place"):
            engine.update_weights(trained["new"])
        engine.continue_generation()
        assert waiting.result(60)["meta_info"]["completion_tokens"] == 200


def test_memory_is_given_back_and_taken_again(engine: Engine, trained: dict[str, Weights], expected: Expected) -> None:
    held = _bytes_of_engine()
    engine.release_memory_occupation()
    assert _bytes_of_engine() < held / 4
    with pytest.raises(RequestError, match="released"):
        engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    engine.update_weights(trained["new"])  # weights are there again
    engine.resume_memory_occupation(tags=["kv_cache"])
    assert tokens_of(engine) == expected["new"]
    engine.update_weights(trained["old"])


def _bytes_of_engine() -> int:
    """As above."""
    gc.collect()
    theirs = set(jax.devices()[4:])
    return sum(array.nbytes for array in jax.live_arrays() if array.devices() <= theirs)


def test_the_same_devices_as_the_trainer(start: Callable[..., Engine], trained: dict[str, Weights], expected: Expected) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    with start(mesh=mesh) as engine:
        assert engine.server_args.tp_size == 2
        engine.update_weights(trained["new"])
        assert tokens_of(engine) == expected["new"]


def test_engines_and_a_trainer_at_once(start: Callable[..., Engine], trained: dict[str, Weights], expected: Expected) -> None:
    """On devices of their own, with a program that computes on others meanwhile."""
    mesh, stop = Mesh(np.array(jax.devices()[:4]), ("x",)), threading.Event()
    step = jax.jit(lambda x: x @ x.T / x.shape[0])
    array = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, PartitionSpec("x")))

    def train() -> int:
        steps = 0
        while not stop.is_set():
            jax.block_until_ready(step(array))
            steps += 1
        return steps

    with (
        start("old", devices=jax.devices()[4:6]) as one,
        start("new", devices=jax.devices()[6:8]) as other,
        concurrent.futures.ThreadPoolExecutor(3) as pool,
    ):
        training = pool.submit(train)
        for _ in range(3):
            mine, theirs = pool.submit(tokens_of, one), pool.submit(tokens_of, other)
            assert (mine.result(60), theirs.result(60)) == (expected["old"], expected["new"])
        stop.set()
        assert training.result(60) > 0


def test_replicas_in_one_process(start: Callable[..., Engine], trained: dict[str, Weights], expected: Expected) -> None:
    with start(devices=jax.devices()[4:6], dp_size=2) as engine:
        assert (engine.server_args.tp_size, engine.server_args.dp_size) == (1, 2)
        engine.update_weights(trained["new"])
        assert tokens_of(engine) == expected["new"]
        WeightSender().send(engine, trained["old"])  # an offer for each
        assert tokens_of(engine) == expected["old"]
    with pytest.raises(EngineError, match="has been shut down"):
        engine.update_weights(trained["old"])


def test_from_a_loop(start: Callable[..., Engine], trained: dict[str, Weights], expected: Expected) -> None:
    async def main() -> None:
        with start(devices=jax.devices()[4:5]) as engine:
            with pytest.raises(ValueError, match="Missing"):
                await engine.async_update_weights({})
            assert await engine.async_update_weights(trained["new"]) == "1"
            generate = functools.partial(engine.async_generate, sampling_params=GREEDY)
            replies: list[Any] = await asyncio.gather(*(generate(input_ids=prompt) for prompt in PROMPTS))
            assert [reply["output_ids"] for reply in replies] == expected["new"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda: {"devices": []}, "tp_size 1 needs 1 device; 0 were given."),
        (lambda: {"devices": jax.devices()[:3], "tp_size": 2}, "tp_size 2 needs 2 devices; 3 were given."),
        (lambda: {"devices": jax.devices()[:1] * 2}, "devices must not be the same"),
        (lambda: {"devices": ["cpu:0"]}, "devices must be of jax.Device, as jax.devices\\(\\) lists them; got 'cpu:0'."),
        (
            lambda: {"devices": jax.devices()[:1], "device": "tpu"},
            "device must name the platform of the devices, cpu; got 'tpu'.",
        ),
        (lambda: {"devices": jax.devices()[:3]}, "3"),  # heads cannot be divided so
        (lambda: {"mesh": Mesh(np.array(jax.devices()[:1]), ("x",)), "devices": jax.devices()[:1]}, "not both"),
        (lambda: {"in_process": False, "devices": jax.devices()[:1]}, "mesh and devices must come with in_process=True"),
        (
            lambda: {"nnodes": 2, "tp_size": 2, "dist_init_addr": "127.0.0.1:5"},
            "nnodes must be 1 for an Engine in this process; got 2.",
        ),
        (lambda: {"restart_workers": True}, "restart_workers must be False for an Engine in this process; got True."),
    ],
)
def test_what_an_engine_cannot_be_made_of(
    start: Callable[..., Engine], options: Callable[[], dict[str, Any]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        start(**options())


def test_weights_as_arrays_are_for_engines_in_this_process(
    start: Callable[..., Engine], trained: dict[str, Weights], expected: Expected
) -> None:
    """Others fetch them."""
    with start(in_process=False) as engine:
        with pytest.raises(ValueError, match="needs an Engine with in_process=True"):
            engine.update_weights(trained["new"])
        WeightSender().send(engine, trained["new"], weight_version="sent")
        assert tokens_of(engine) == expected["new"]
        assert engine.get_model_info()["weight_version"] == "sent"


PROGRAM = """
import os, signal, sys, threading
import jax
from jaxserve import Engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal; what a shell starts in the background ignores it
jax.config.update("jax_transfer_guard", "disallow")  # of the program's own code
jax.config.update("jax_numpy_dtype_promotion", "strict")
engine = Engine({folder!r}, in_process=True, max_running_requests=4, chunked_prefill_size=64, page_size=16,
                max_total_tokens=2048, decode_row_buckets=(4,), compilation_cache_dir={cache!r}, skip_tokenizer_init=True)
ask = lambda n: engine.generate(input_ids=[5, 6], sampling_params=dict(max_new_tokens=n, ignore_eos=True))
assert len(ask(4)["output_ids"]) == 4
if {interrupts!r}:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        ask(450), ask(450), ask(450), ask(450), ask(450), ask(450), ask(450), ask(450)
        sys.exit("no KeyboardInterrupt")
    except KeyboardInterrupt:
        assert len(ask(4)["output_ids"]) == 4
print("done", flush=True)
"""


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_program_ends_as_it_wants(folders: dict[str, Path], compilation_cache: str, interrupts: bool) -> None:
    """Without a shutdown; and Ctrl-C is its own, after which the engine serves on."""
    program = textwrap.dedent(PROGRAM).format(folder=str(folders["old"]), cache=compilation_cache, interrupts=interrupts)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
