"""Runners on devices of a program that goes on computing in the same process."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from driven_runner import MAX_ROWS, Driver
from jax._src.monitoring import get_event_duration_listeners
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.commands import CheckWeights, ReleaseMemory, ResumeMemory
from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, background, build, build_runner
from jaxserve.executor.build import draw_blueprints
from jaxserve.executor.memory import DeviceMemory, MemoryBudget, StepMemory, weight_bytes
from jaxserve.executor.mesh import Sizes, check_given
from jaxserve.executor.own_settings import own_settings
from jaxserve.executor.weights import WeightLoader

MIB = 1 << 20
PROMPTS = {0: [5, 6, 7, 8, 9], 3: [17, 4, 11]}


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    process_index: int
    platform: str


def options(model: Path, cache: Path, **changes: Any) -> ServerArgs:
    return ServerArgs(
        model_path=str(model),
        page_size=1,
        max_total_tokens=MAX_ROWS * 64,
        max_running_requests=MAX_ROWS,
        context_length=64,
        chunked_prefill_size=32,
        prefill_token_buckets=(32,),
        decode_row_buckets=(MAX_ROWS,),
        grammar_backend="none",
        compilation_cache_dir=str(cache),
    ).replace(**changes)


def runner_on(args: ServerArgs, devices: Sequence[jax.Device], warmup: str = "full") -> ModelRunner:
    return build_runner(args.replace(tp_size=len(devices)), warmup=warmup, show_progress=False, devices=devices).runner


def tokens(runner: ModelRunner, steps: int = 6) -> list[dict[int, int]]:
    """Greedy, of PROMPTS."""
    driver = Driver(runner)
    return [driver.run(PROMPTS), *(driver.run({}, list(PROMPTS)) for _ in range(steps))]


def arrays_of(runner: ModelRunner) -> list[jax.Array]:
    stages = runner._pipeline.own
    found: list[jax.Array] = jax.tree.leaves([(stage.params, stage.state, stage.sampling) for stage in stages])
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


@contextlib.contextmanager
def training(devices: Sequence[jax.Device]) -> Iterator[list[float]]:
    """A thread that trains on these all the while, and compiles now and then; its losses."""
    mesh = Mesh(np.asarray(devices), ("batch",))
    x = jax.device_put(np.ones((16, 32), np.float32), NamedSharding(mesh, PartitionSpec("batch")))
    losses: list[float] = []
    is_over = threading.Event()

    def train() -> None:
        w = jax.device_put(np.full((32, 32), 0.01, np.float32), NamedSharding(mesh, PartitionSpec()))
        while not is_over.is_set():
            rate = 0.1 / (len(losses) // 8 + 1)  # a constant: another program after some steps
            loss, gradient = jax.jit(jax.value_and_grad(lambda w: ((x @ w - 1) ** 2).mean()))(w)
            w = jax.jit(lambda w, gradient: w - rate * gradient)(w, gradient)  # noqa: B023
            losses.append(float(loss))

    with ThreadPoolExecutor(1, "trainer") as thread:
        future = thread.submit(train)
        try:
            while not losses and not future.done():
                time.sleep(0.01)
            yield losses
        finally:
            is_over.set()
            future.result()
    assert losses[-1] < losses[0]


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("half", [slice(4, 8), slice(0, 4)], ids=["second half", "first half"])
def test_one_half_beside_a_trainer(model: Path, cache: Path, half: slice) -> None:
    """Whose compilations are not ours; nor does a program of one half serve on the other."""
    args, devices = options(model, cache), jax.devices()[half]
    config, environment = dict(jax.config.values), dict(os.environ)
    with training(devices):
        cold, warm = runner_on(args, devices), runner_on(args, devices, warmup="auto")
        expected = tokens(cold)
        assert tokens(warm) == expected
    assert (jax.config.values, os.environ) == (config, environment)
    states = [runner.internal_state() for runner in (cold, warm)]
    num_programs = len(cold._program_set.all)
    assert [state["compiles_total"] for state in states] == [num_programs, 0]
    assert [state["compiles_after_ready_total"] for state in states] == [0, 0]
    assert "imports" not in states[0]["startup_s"], "the process is older than the engine"
    for runner in (cold, warm):
        assert {tuple(array.sharding.device_set) for array in arrays_of(runner)} <= {tuple(set(devices))}
        assert list(runner._pipeline.last.mesh.devices.flat) == devices
        runner.close()


@pytest.mark.parametrize("other", [slice(0, 4), slice(4, 8)], ids=["disjoint", "same"])
def test_two_at_once(model: Path, cache: Path, other: slice) -> None:
    """From a thread each, while another trains on all devices."""
    args = options(model, cache)
    runners = [runner_on(args, jax.devices()[half]) for half in (slice(4, 8), other)]
    expected = tokens(runners[0], 30)
    with training(jax.devices()), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(tokens, runners, [30, 30]))
    assert found == [expected, expected]
    for runner in runners:
        assert runner.internal_state()["compiles_after_ready_total"] == 0
        runner.close()


def test_what_is_compiled_in_front_of_traffic_counts(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that steps and in that of commands; not elsewhere."""
    runner = runner_on(options(model, cache), jax.devices()[4:8])

    def compile_more(*_: Any) -> None:
        jax.jit(lambda x: x + 1)(1)

    def late() -> int:
        count: int = runner.internal_state()["compiles_after_ready_total"]
        return count

    compile_more()
    assert late() == 0
    monkeypatch.setattr(WeightLoader, "check", compile_more)
    runner.execute(CheckWeights("", "auto")).result()
    assert late() == 1
    monkeypatch.setattr(runner._pipeline, "show_failure", compile_more)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(Driver(runner).run, PROMPTS).result()
    assert late() == 2
    runner.close()


def test_the_rest_is_compiled_in_this_process(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on CPU; and what goes on when it is closed ends."""
    monkeypatch.setattr(background.subprocess, "Popen", None)
    with training(jax.devices()[:1]):
        runner = runner_on(options(model, tmp_path), jax.devices()[:1], warmup="early")
        missing = runner.num_programs_missing
        while runner.tend() == missing:
            time.sleep(0.02)
    runner.close()
    assert "background-compiler" not in threads()
    num_programs = len(runner._program_set.all)
    assert num_programs - missing < runner.internal_state()["compiles_total"] <= num_programs


def test_what_a_program_forbids_itself_is_not_forbidden_here(model: Path, cache: Path) -> None:
    """A thread that steps has to say so."""
    devices, args = jax.devices()[4:8], options(model, cache)
    allowed = runner_on(args, devices)
    expected = tokens(allowed)
    allowed.close()
    forbidden = {
        "jax_transfer_guard": "disallow",
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_debug_nans": True,
    }
    before = {name: jax.config.values[name] for name in forbidden}
    for name, value in forbidden.items():
        jax.config.update(name, value)
    try:
        runner = runner_on(args, devices[:1], warmup="early")  # nothing is cached for one device
        with own_settings():
            found = tokens(runner)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert found == expected
    runner.close()


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"pp_size": 2}], ids=["one stage", "stages"])
def test_nothing_is_left_of_a_closed_runner(model: Path, cache: Path, sizes: dict[str, int]) -> None:
    gc.collect()
    before, before_threads, before_listeners = jax.live_arrays(), threads(), len(get_event_duration_listeners())
    args, devices = options(model, cache, **sizes), jax.devices()[4 : 4 + math.prod(sizes.values())]
    warmup = "early" if args.pp_size > 1 else "full"  # a pipeline with few programs, which are all that it ever has
    runner = build_runner(args, warmup=warmup, show_progress=False, devices=devices).runner
    tokens(runner, 2)
    runner.execute(ReleaseMemory(("kv_cache",))).result()
    runner.execute(ResumeMemory(("kv_cache",))).result()
    driver = Driver(runner)
    driver.launch(PROMPTS)  # nobody fetches it
    del driver
    meshes = [stage.mesh for stage in runner._pipeline.stages]
    assert [device for mesh in meshes for device in mesh.devices.flat] == devices
    arrays, is_there = arrays_of(runner), weakref.ref(runner)
    runner.close()
    runner.close()
    assert all(array.is_deleted() for array in arrays)
    assert threads() == before_threads
    del arrays, runner
    gc.collect()
    known = set(map(id, before))
    assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []
    assert is_there() is None
    assert len(get_event_duration_listeners()) == before_listeners


def test_devices_that_do_not_fit_are_a_sentence(model: Path, tmp_path: Path) -> None:
    here = jax.devices()
    elsewhere, gpu = FakeDevice(1, "cpu"), FakeDevice(0, "gpu")
    cases: list[tuple[Sequence[Any], int, int, str, str]] = [
        (here[:3], 1, 4, "auto", "tp_size 4 needs 4 devices; 3 were given."),
        (here[:1], 2, 2, "auto", "pp_size 2 with tp_size 2 needs 4 devices; 1 was given."),
        (here[:2], 1, 1, "auto", "tp_size 1 needs 1 device; 2 were given."),
        ([here[1], here[1]], 1, 2, "auto", f"devices must not be the same; {here[1]} was given twice."),
        ([elsewhere], 1, 1, "auto", f"devices must be of this process (0); {elsewhere} is of 1."),
        ([here[0], gpu], 1, 2, "auto", f"devices must be of one platform; {here[0]} and {gpu} were given."),
        (here[:1], 1, 1, "cuda", "device must name the platform of the devices, cpu; got 'cuda'."),
    ]
    for devices, pp_size, tp_size, platform, expected in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            check_given(devices, Sizes(pp_size, tp_size, 1), platform)
    check_given(here[4:8], Sizes(1, 2, 2), "cpu")
    check_given([gpu], Sizes(1, 1, 1), "cuda")
    with pytest.raises(ValueError, match=r"^tp_size 4 needs 4 devices; 3 were given\.$"):
        build_runner(options(model, tmp_path, tp_size=4), devices=here[:3])


def test_numbers_of_64_bits_are_a_sentence(model: Path, tmp_path: Path) -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        with pytest.raises(ValueError, match=r"^jax_enable_x64 must be off"):
            draw_blueprints(options(model, tmp_path), jax.devices()[:1])
    finally:
        jax.config.update("jax_enable_x64", False)


def test_the_pool_comes_of_what_the_program_left(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device where that is least: a share of it, not of the whole."""
    blueprints = draw_blueprints(options(model, tmp_path, tp_size=2, max_total_tokens=None), jax.devices()[:2])
    blueprint = dataclasses.replace(blueprints[0], args=blueprints[0].args.replace(mem_fraction_static=0.5))
    weights, page = weight_bytes(blueprint), sum(blueprint.page_bytes)
    monkeypatch.setattr(type(blueprint), "platform", "tpu")  # whose devices have memory of their own
    monkeypatch.setattr(build, "measure_steps", lambda *_: StepMemory(0, 0))

    def plan(total: int, *free: int, **asked: Any) -> MemoryBudget:
        left = iter(free)
        monkeypatch.setattr(build, "measure", lambda *_: DeviceMemory(total, next(left)))
        return build.plan_memory([blueprint], tmp_path, weights_loaded=True, **asked)[0]

    alone = plan(100 * MIB, 100 * MIB - weights, 100 * MIB - weights)
    tight = plan(100 * MIB, 90 * MIB, 40 * MIB, is_guest=True)
    assert tight.others == 60 * MIB - weights and tight.fitting_pages < alone.fitting_pages
    tables = tight.row_tables + tight.page_table + tight.hidden + tight.states
    room = 40 * MIB - (40 * MIB + weights) // 2 - tables
    assert 15 / 16 * room - page <= tight.fitting_pages * page <= room
    near = plan(100 * MIB, 40 * MIB - 999, 40 * MIB, is_guest=True)
    assert near.num_pages == tight.num_pages, "the same programs"
    with pytest.raises(ValueError, match=r"^No memory is left"):
        plan(100 * MIB, 90 * MIB, MIB // 2, is_guest=True)
