"""Weights as arrays, handed over in the process or read from what a request brings, given to a real runner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import make_checkpoint
from commanded_runner import (
    PROMPTS,
    build_small,
    compiling_nothing,
    execute,
    generate,
    live_bytes,
    loader_of,
    refusal,
    replace,
    tokens_of,
)
from jax.experimental import transfer
from safetensors.numpy import load_file, save

from jaxserve.commands import (
    CheckTensors,
    ForgetTensors,
    OfferedTensor,
    PullTensors,
    ReadTensors,
    ReleaseMemory,
    ReplaceTensors,
    ResumeMemory,
    WeightsLost,
)
from jaxserve.executor import ModelRunner
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.weights import delete
from jaxserve.handover import Handover
from jaxserve.models import ModelConfig, array_batch, divide_layers
from jaxserve.models.given_tensors import GivenTensor


@pytest.fixture(scope="module")
def old(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def handover() -> Handover:
    return Handover()


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, handover: Handover) -> Callable[..., ModelRunner]:
    return functools.partial(build_small, cache=tmp_path_factory.mktemp("cache"), handover=handover)


@pytest.fixture(scope="module")
def runner(build: Callable[..., ModelRunner], old: Path) -> ModelRunner:
    return build(old)


@pytest.fixture(scope="module")
def old_tokens(runner: ModelRunner) -> list[list[int]]:
    return tokens_of(runner)


@pytest.fixture(scope="module")
def new_tokens(build: Callable[..., ModelRunner], new: Path, old_tokens: list[list[int]]) -> list[list[int]]:
    tokens = tokens_of(build(new))
    assert tokens != old_tokens
    return tokens


def trained(folder: Path) -> dict[str, GivenTensor]:
    """A checkpoint as a trainer has it, on another device."""
    device = jax.devices()[1]
    tensors = load_file(folder / "model.safetensors")
    return {name: GivenTensor(jax.device_put(array, device)) for name, array in tensors.items()}


def hand_over(runner: ModelRunner, handover: Handover, given: dict[str, GivenTensor], *, partial: bool = False) -> None:
    number = handover.leave(given)
    execute(runner, CheckTensors(number, partial))
    try:
        runner.execute(ReplaceTensors(number, partial)).result(timeout=120)
    finally:
        assert handover.peek(number) is given  # for other replicas
        handover.drop(number)


def test_arrays_give_the_tokens_of_a_fresh_runner(
    runner: ModelRunner,
    handover: Handover,
    old: Path,
    new: Path,
    old_tokens: list[list[int]],
    new_tokens: list[list[int]],
) -> None:
    before = live_bytes()
    first, second = trained(new), trained(old)
    hand_over(runner, handover, first)
    assert tokens_of(runner) == new_tokens
    with compiling_nothing(runner):
        hand_over(runner, handover, second)
        delete([tensor.array for tensor in second.values()])
        assert tokens_of(runner) == old_tokens
        hand_over(runner, handover, first)
        assert tokens_of(runner) == new_tokens
        hand_over(runner, handover, {"model.norm.weight": first["model.norm.weight"]}, partial=True)
    replace(runner, old)
    assert tokens_of(runner) == old_tokens
    del first, second
    assert live_bytes() == before


def test_arrays_that_are_refused_change_nothing(
    runner: ModelRunner, handover: Handover, new: Path, old_tokens: list[list[int]]
) -> None:
    given = trained(new)
    delete(given["model.norm.weight"].array)
    number = handover.leave(given)
    says = "Deleted arrays, as donated ones are: model.norm.weight."
    assert refusal(runner, CheckTensors(number, partial=False)) == says
    assert refusal(runner, ReplaceTensors(number, partial=False)) == says
    number = handover.leave({"model.norm.weight": GivenTensor(np.ones(64, np.float32))})
    assert "Missing tensors: " in refusal(runner, ReplaceTensors(number, partial=False))
    assert tokens_of(runner) == old_tokens


def test_arrays_need_an_engine_in_their_process(runner: ModelRunner, old_tokens: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._commands, "_handover", None)
        for command in (CheckTensors(1, partial=False), ReplaceTensors(1, partial=True)):
            assert refusal(runner, command).endswith("must be in the engine's own process (in_process=True).")
    assert tokens_of(runner) == old_tokens


def test_arrays_in_place_of_released_weights(
    runner: ModelRunner,
    handover: Handover,
    old: Path,
    new: Path,
    old_tokens: list[list[int]],
    new_tokens: list[list[int]],
) -> None:
    execute(runner, ReleaseMemory(("weights",)))
    given = trained(new)
    some = handover.leave({"model.norm.weight": given["model.norm.weight"]})
    assert "The weights are released: all tensors" in refusal(runner, ReplaceTensors(some, partial=True))
    hand_over(runner, handover, given)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_a_failure_half_way_leaves_no_weights(
    runner: ModelRunner, handover: Handover, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    """Those of half a model would be worse; they come back from where they came last, or whole."""
    given, make_some, remaining = trained(new), array_batch.make_all, iter(range(2))

    def failing(*args: Any) -> list[jax.Array]:
        if next(remaining, None) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the memory is gone\nand where it went")
        return make_some(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_batch, "make_all", failing)
        with pytest.raises(WeightsLost, match=r"the memory is gone The old weights are partly replaced and gone"):
            hand_over(runner, handover, given)
    assert runner.internal_state()["memory_usage"]["weight_gb"] == 0
    with pytest.raises(AssertionError, match="memory is released"):
        generate(runner, PROMPTS[0])
    execute(runner, ResumeMemory(("weights",)))
    assert tokens_of(runner) == old_tokens
    hand_over(runner, handover, given)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_arrays_for_two_stages(old: Path, new: Path) -> None:
    config = ModelConfig.from_pretrained(old)
    devices = jax.devices()
    stages = tuple(
        (stage, make_mesh(2, devices[first : first + 2]))
        for stage, first in zip(divide_layers(config.num_layers, 2), (2, 4), strict=True)
    )
    loader = dataclasses.replace(loader_of(config, stages[0][1]), stages=stages)
    params, expected, given = loader.load(str(old), "auto"), loader.load(str(new), "auto"), trained(new)
    loader.check_tensors(params, given, partial=False)
    jax.tree.map(np.testing.assert_array_equal, loader.replace_tensors(params, given), expected)
    del given["model.norm.weight"], given["model.embed_tokens.weight"]
    given["lm.norm"] = given["model.layers.0.input_layernorm.weight"]
    with pytest.raises(ValueError, match="Missing tensors") as refused:
        loader.check_tensors(expected, given, partial=False)
    sentences = str(refused.value).split(". ")
    assert sorted(sentences) == [  # of each stage, and what both say once
        "Missing tensors: model.embed_tokens.weight",
        "Missing tensors: model.norm.weight.",
        "The model has no tensors of these names: lm.norm",
    ]


# --- and as files in memory


def files_of(folder: Path, count: int = 2) -> list[bytes]:
    """A checkpoint's tensors in several files."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    return [save(dict(tensors[start::count])) for start in range(count)]


def test_files_give_the_tokens_of_a_fresh_runner(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    replace(runner, old)
    before = live_bytes()
    execute(runner, ReadTensors((files_of(new)[0],)))
    execute(runner, ReadTensors((files_of(new)[1],)))
    assert tokens_of(runner) == old_tokens
    runner.execute(ReplaceTensors(None, partial=False)).result(timeout=120)
    assert tokens_of(runner) == new_tokens
    execute(runner, ForgetTensors())
    norm = {"model.norm.weight": load_file(new / "model.safetensors")["model.norm.weight"].astype(ml_dtypes.bfloat16)}
    execute(runner, ReadTensors((save(norm),)))
    execute(runner, CheckTensors(None, partial=True))
    runner.execute(ReplaceTensors(None, partial=True)).result(timeout=120)
    execute(runner, ForgetTensors())
    with compiling_nothing(runner):
        execute(runner, ReadTensors(tuple(files_of(old))))
        execute(runner, ReplaceTensors(None, partial=True))
        assert tokens_of(runner) == old_tokens
    execute(runner, ForgetTensors())
    assert live_bytes() == before


# --- and as arrays that somebody offers


@pytest.fixture(scope="module")
def offering() -> Any:
    """A trainer's end. In this process, whose devices have a client of their own."""
    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])


def offered(offering: Any, number: int, arrays: dict[str, np.ndarray], **others: Any) -> PullTensors:
    """`others`: in place of what is true."""
    offering.await_pull(number, [jax.device_put(array, jax.devices()[0]) for array in arrays.values()])
    described = tuple(OfferedTensor(name, str(array.dtype), array.shape) for name, array in arrays.items())
    fields: dict[str, Any] = {"address": offering.address(), "uuid": number, "tensors": described, "timeout_s": 60.0}
    return PullTensors(**fields | others)


def test_offered_arrays_give_the_tokens_of_a_fresh_runner(
    runner: ModelRunner, offering: Any, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    replace(runner, old)
    before = live_bytes()
    first, second = (load_file(folder / "model.safetensors") for folder in (new, old))
    norm = first.pop("model.norm.weight")
    execute(runner, offered(offering, 1, first))
    execute(runner, offered(offering, 2, {"model.norm.weight": norm.astype(ml_dtypes.bfloat16).astype(np.float32)}))
    assert tokens_of(runner) == old_tokens
    runner.execute(ReplaceTensors(None, partial=False)).result(timeout=120)
    assert tokens_of(runner) == new_tokens
    execute(runner, ForgetTensors())
    with compiling_nothing(runner):
        execute(runner, offered(offering, 3, second))
        execute(runner, ReplaceTensors(None, partial=False))
        assert tokens_of(runner) == old_tokens
    execute(runner, ForgetTensors())
    del first, second
    assert live_bytes() == before


def test_offers_that_are_not_what_was_said(runner: ModelRunner, offering: Any, old_tokens: list[list[int]]) -> None:
    norm = {"model.norm.weight": np.ones(64, np.float32)}
    never = offered(offering, 10, norm, uuid=11, timeout_s=0.2)
    assert "have not come within 0.2 s" in refusal(runner, never)
    nobody = offered(offering, 12, norm, address="127.0.0.1:9", timeout_s=0.2)
    assert refusal(runner, nobody)
    larger = offered(offering, 13, norm, tensors=(OfferedTensor("model.norm.weight", "float32", (65,)),))
    assert refusal(runner, larger)
    unknown = offered(offering, 14, norm, tensors=(OfferedTensor("model.norm.weight", "float33", (64,)),))
    assert "The dtype of model.norm.weight must be one of an array's; got 'float33'." in refusal(runner, unknown)
    one = OfferedTensor("model.norm.weight", "float32", (64,))
    twice = offered(offering, 15, norm | {"other": np.ones(64, np.float32)}, tensors=(one, one))
    assert refusal(runner, twice) == "The tensor model.norm.weight is given twice."
    assert "No tensors are given." in refusal(runner, CheckTensors(None, partial=True))
    execute(runner, offered(offering, 16, norm))
    execute(runner, CheckTensors(None, partial=True))
    execute(runner, ForgetTensors())
    assert tokens_of(runner) == old_tokens


def test_files_that_are_refused_change_nothing(runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]]) -> None:
    first, second = files_of(new)
    assert "bytes must be a whole safetensors file: " in refusal(runner, ReadTensors((first, second[:-1])))
    assert "No tensors are given." in refusal(runner, CheckTensors(None, partial=True)), "not the first one either"
    execute(runner, ReadTensors((first,)))
    assert refusal(runner, ReadTensors((second, first))).endswith(" is given twice.")
    assert "Missing tensors: " in refusal(runner, CheckTensors(None, partial=False))
    execute(runner, ForgetTensors())
    numbers = save({"model.norm.weight": np.ones(64, np.int8)})
    assert "The type of tensor model.norm.weight must be one of F64, F32, F16, BF16; got I8." in refusal(
        runner, ReadTensors((numbers,))
    )
    execute(runner, ReadTensors((save({"model.norm.weight": np.ones(3, np.float32), "no.such": np.ones(3, np.float32)}),)))
    says = refusal(runner, ReplaceTensors(None, partial=True))
    assert "no tensors of these names: no.such." in says and "Wrong shapes: model.norm.weight is [3]" in says
    execute(runner, ForgetTensors())
    assert tokens_of(runner) == old_tokens
