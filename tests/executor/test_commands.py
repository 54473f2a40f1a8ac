"""Commands to a real runner: other weights give exactly a fresh runner's tokens, what fails changes nothing, memory is flat."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from checkpoints import make_checkpoint
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build_runner
from jaxserve.executor.mesh import make_mesh
from jaxserve.executor.warmup import CompileCounter
from jaxserve.executor.weights import WeightLoader, delete
from jaxserve.handover import Handover
from jaxserve.models import TENSOR_AXIS, ModelConfig, convert, divide_layers
from jaxserve.models.given_tensors import GivenTensor
from jaxserve.models.safetensors_files import SafetensorsCheckpoint
from jaxserve.models.tensor_update import TensorUpdate
from jaxserve.runner import (
    CheckTensors,
    CheckWeights,
    Command,
    CommandError,
    PageUpdates,
    ReleaseMemory,
    ReplaceTensors,
    ReplaceWeights,
    ResumeMemory,
    RowState,
    StepInput,
    WeightsLost,
    launch,
)
from jaxserve.types import ForwardMode, SamplingParams

PROMPTS = ([5, 6, 7, 8, 9], [40, 41, 42], list(range(60, 75)))
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def old(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory, handover: Handover) -> Callable[..., ModelRunner]:
    cache = str(tmp_path_factory.mktemp("cache"))

    def build(path: Path, **options: Any) -> ModelRunner:
        args = ServerArgs(
            model_path=str(path), page_size=1, max_total_tokens=200, max_running_requests=2, context_length=100,
            chunked_prefill_size=16, decode_row_buckets=(2,), compilation_cache_dir=cache, **options,
        )  # fmt: skip
        return build_runner(args, show_progress=False, handover=handover).runner

    return build


@pytest.fixture(scope="module")
def handover() -> Handover:
    return Handover()


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


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are replaced as they are there, over copies in the host's memory."""
    monkeypatch.setattr(WeightLoader, "loads_beside", False)


def tokens_of(runner: ModelRunner) -> list[list[int]]:
    return [generate(runner, prompt) for prompt in PROMPTS]


def generate(runner: ModelRunner, prompt: list[int]) -> list[int]:
    """Greedy tokens of a prompt, alone in row 0 and the pool's first pages."""
    with compiling_nothing(runner):
        first = run(runner, prompt, 0, decode=False)
        return [first, *(run(runner, prompt, at, decode=True) for at in range(len(prompt), len(prompt) + NUM_TOKENS - 1))]


@contextlib.contextmanager
def compiling_nothing(runner: ModelRunner) -> Iterator[None]:
    before = runner.internal_state()["compiles_total"]
    yield
    assert runner.internal_state()["compiles_total"] == before


def run(runner: ModelRunner, prompt: list[int], start: int, *, decode: bool) -> int:
    nothing, count = np.zeros(0, np.int32), 1 if decode else len(prompt)
    positions = np.arange(start, start + count, dtype=np.int32)
    state = RowState(0, SamplingParams(temperature=0), 0, len(prompt), nothing, nothing, np.array(prompt, np.int32))
    step = StepInput(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        rows=np.zeros(1, np.int32),
        seq_lens=np.array([start + count], np.int32),
        extend_lens=np.array([count], np.int32),
        num_decode_rows=int(decode),
        input_ids=nothing if decode else np.array(prompt, np.int32),
        sample=np.array([True]),
        page_updates=PageUpdates.of(np.zeros(count, np.int32), positions, positions),
        new_rows=[] if decode else [state],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=False,
        needs_top_logprobs=False,
    )
    return int(runner.fetch(launch(runner, step)).token_ids[0, 0])


def execute(runner: ModelRunner, command: Command) -> None:
    with compiling_nothing(runner):
        runner.execute(command).result(timeout=120)


def replace(runner: ModelRunner, path: Path, load_format: str = "auto") -> None:
    execute(runner, ReplaceWeights(str(path), load_format))


def refusal(runner: ModelRunner, command: Command) -> str:
    with pytest.raises(CommandError) as error:
        execute(runner, command)
    return str(error.value)


def damaged(source: Path, folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of a checkpoint whose tensors were changed."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return folder


def test_other_weights_give_the_tokens_of_a_fresh_runner(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old, "safetensors")
    assert tokens_of(runner) == old_tokens


def test_the_way_over_the_host(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]], on_accelerator: None
) -> None:
    """Also back, when loading fails half-way: there is only one set of weights on the devices at any time."""
    before = live_bytes()
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)
    with failing_reads(after=5):
        message = refusal(runner, ReplaceWeights(str(new), "auto"))
    assert "the disk is gone" in message and "The weights are still the old ones." in message
    assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def test_the_host_has_no_room_for_a_second_set(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightLoader, "fits_on_host", lambda loader, params: False)
    assert "Release the weights first" in refusal(runner, ReplaceWeights(str(new), "auto"))
    assert tokens_of(runner) == old_tokens


def test_loading_that_fails_half_way_leaves_the_old_weights(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]]
) -> None:
    before = live_bytes()
    with failing_reads(after=5):
        assert "the disk is gone" in refusal(runner, ReplaceWeights(str(new), "auto"))
    assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def remove_a_tensor(tensors: dict[str, np.ndarray]) -> None:
    del tensors["model.layers.1.mlp.down_proj.weight"]


def change_a_shape(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]


def change_a_type(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (remove_a_tensor, "tensor model.layers.1.mlp.down_proj.weight is missing"),
        (change_a_shape, "tensor model.norm.weight has shape [63], but config.json asks for [64]"),
        (change_a_type, "tensor model.norm.weight has type I32"),
    ],
)
def test_a_tensor_that_is_wrong_is_named_and_nothing_changes(
    runner: ModelRunner, new: Path, old_tokens: list[list[int]], tmp_path: Path, change: Any, says: str
) -> None:
    folder = str(damaged(new, tmp_path / "damaged", change))
    for command in (CheckWeights(folder, "auto"), ReplaceWeights(folder, "auto")):
        assert says in refusal(runner, command)
    assert tokens_of(runner) == old_tokens


def test_another_model_is_refused_by_what_differs(
    runner: ModelRunner, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "architecture is 'LlamaForCausalLM'" in refusal(runner, CheckWeights(str(checkpoint("llama")), "auto"))
    folder = tmp_path / "other"
    shutil.copytree(checkpoint("qwen3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    message = refusal(runner, CheckWeights(str(folder), "auto"))
    assert "layers.0.mixer.num_kv_heads is 4, that of the served one 2" in message
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}))
    assert "number of layers is 1, that of the served one 2" in refusal(runner, CheckWeights(str(folder), "auto"))


@pytest.mark.parametrize(
    ("path", "load_format", "says"),
    [
        ("/nowhere", "auto", "model_path '/nowhere' is not a folder."),
        ("", "auto", "model_path '' is not a folder."),
        (None, "pickle", "got 'pickle'"),
        (None, "orbax", "does not exist; write it with `jaxserve convert`"),
    ],
)
def test_bad_paths_and_formats(runner: ModelRunner, new: Path, path: str | None, load_format: str, says: str) -> None:
    assert says in refusal(runner, CheckWeights(str(new) if path is None else path, load_format))


def test_a_file_that_is_cut_off_is_named(runner: ModelRunner, new: Path, old_tokens: list[list[int]], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    shutil.copytree(new, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "is cut off" in refusal(runner, ReplaceWeights(str(folder), "auto"))
    assert tokens_of(runner) == old_tokens


def test_an_orbax_folder(runner: ModelRunner, old: Path, new: Path, new_tokens: list[list[int]], tmp_path: Path) -> None:
    folder = convert(new, tmp_path / "converted", progress=False)
    execute(runner, CheckWeights(str(folder), "auto"))
    replace(runner, folder)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_fifty_updates_leave_memory_flat(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    def update_twice() -> None:
        replace(runner, new)
        replace(runner, old)

    for _ in range(3):
        update_twice()
    bytes_before, resident_before = live_bytes(), psutil.Process().memory_info().rss
    for _ in range(25):
        update_twice()
    assert live_bytes() == bytes_before
    assert psutil.Process().memory_info().rss - resident_before < 24 << 20
    assert tokens_of(runner) == old_tokens
    replace(runner, new)
    assert tokens_of(runner) == new_tokens
    replace(runner, old)


def test_memory_is_released_and_resumed(runner: ModelRunner, old_tokens: list[list[int]]) -> None:
    whole = runner.internal_state()["memory_usage"]
    before = live_bytes()
    for tags in (("kv_cache",), ("weights",), ("weights", "kv_cache")):
        execute(runner, ReleaseMemory(tags))
        usage = runner.internal_state()["memory_usage"]
        names = {"weights": "weight_gb", "kv_cache": "kvcache_gb"}
        assert all(usage[name] == (0 if tag in tags else whole[name]) for tag, name in names.items())
        assert live_bytes() == before - round(sum(whole[names[tag]] for tag in tags) * 1e9)
        execute(runner, ResumeMemory(tags))
        assert runner.internal_state()["memory_usage"] == whole
        assert tokens_of(runner) == old_tokens
    assert live_bytes() == before


def test_release_and_resume_in_the_wrong_state_change_nothing(runner: ModelRunner, old_tokens: list[list[int]]) -> None:
    assert refusal(runner, ResumeMemory(("kv_cache",))) == "kv_cache is not released."
    execute(runner, ReleaseMemory(("kv_cache",)))
    assert refusal(runner, ReleaseMemory(("weights", "kv_cache"))) == "kv_cache is released already."
    assert refusal(runner, ResumeMemory(("weights", "kv_cache"))) == "weights is not released."
    with pytest.raises(AssertionError, match="memory is released"):
        generate(runner, PROMPTS[0])
    execute(runner, ResumeMemory(("kv_cache",)))
    assert tokens_of(runner) == old_tokens


def test_released_weights_can_be_replaced_and_come_back_from_where_they_came_last(
    runner: ModelRunner, old: Path, new: Path, old_tokens: list[list[int]], new_tokens: list[list[int]]
) -> None:
    execute(runner, ReleaseMemory(("kv_cache", "weights")))
    with failing_reads(after=5):
        assert refusal(runner, ReplaceWeights(str(new), "auto")).endswith("the disk is gone")
        assert "the disk is gone" in refusal(runner, ResumeMemory(("kv_cache", "weights")))
    assert runner.internal_state()["memory_usage"]["weight_gb"] == 0
    replace(runner, new)
    execute(runner, ResumeMemory(("kv_cache",)))
    assert tokens_of(runner) == new_tokens
    execute(runner, ReleaseMemory(("weights",)))
    execute(runner, ResumeMemory(("weights",)))
    assert tokens_of(runner) == new_tokens
    replace(runner, old)
    assert tokens_of(runner) == old_tokens


def test_quantized_weights(
    build: Callable[..., ModelRunner], old: Path, new: Path, tmp_path: Path, on_accelerator: None
) -> None:
    expected = tokens_of(build(new, quantization="int8wo"))
    runner = build(old, quantization="int8wo")
    assert tokens_of(runner) != expected
    replace(runner, new)
    assert tokens_of(runner) == expected
    replace(runner, old)
    replace(runner, convert(new, tmp_path / "converted", progress=False))
    assert tokens_of(runner) == expected


# --- weights as arrays


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
    given, make_one, remaining = trained(new), TensorUpdate._make, iter(range(5))

    def failing(*args: Any) -> jax.Array:
        if next(remaining, None) is None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the memory is gone\nand where it went")
        return make_one(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorUpdate, "_make", failing)
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
    del given["model.norm.weight"]
    with pytest.raises(ValueError, match=r"Missing tensors: model\.norm\.weight\."):
        loader.check_tensors(expected, given, partial=False)


def loader_of(config: ModelConfig, mesh: Mesh, context_len: int | None = None) -> WeightLoader:
    return WeightLoader(
        config=config,
        context_len=context_len or config.context_len,
        stages=((None, mesh),),
        dtype=np.dtype(np.float32),
        model_override_args="{}",
    )


def test_a_window_that_no_sequence_outgrows_makes_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    assert config.windows == (8,) * config.num_layers
    loader_of(config.for_context(8), make_mesh(1), context_len=8).check(str(folder), "auto")
    loader_of(config, make_mesh(1)).check(str(folder), "auto")


def test_factors_of_rope_that_the_context_decides_make_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("phi3-within", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    loader_of(config.for_context(256), make_mesh(1), context_len=256).check(str(folder), "auto")


def test_options_of_the_server_make_no_other_model(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    config = ModelConfig.from_pretrained(folder)
    loader_of(config.replace(attn_dp_size=2, quantization="int8wo"), make_mesh(2, attn_dp_size=2)).check(str(folder), "auto")


@pytest.mark.parametrize("quantization", [None, "int8wo"])
@pytest.mark.parametrize("load_format", ["safetensors", "orbax", "dummy"])
def test_loading_again_compiles_nothing(
    old: Path, new: Path, tmp_path: Path, load_format: str, quantization: str | None
) -> None:
    """On two devices, where columns are rearranged."""
    config = ModelConfig.from_pretrained(old).replace(quantization=quantization)
    folders = [old, new]
    if load_format == "orbax":
        folders = [convert(folder, tmp_path / folder.name, progress=False) for folder in folders]
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("data", TENSOR_AXIS))
    loader = loader_of(config, mesh)
    first = loader.load(str(folders[0]), load_format)
    counter = CompileCounter()
    counter.mark_ready()
    second = loader.load(str(folders[1]), load_format)
    assert counter.after_ready == 0
    assert jax.tree.map(_kind, first) == jax.tree.map(_kind, second)


def _kind(array: jax.Array) -> tuple[Any, ...]:
    return array.shape, array.dtype, array.sharding


@contextlib.contextmanager
def failing_reads(after: int) -> Iterator[None]:
    """The disk goes away when so many slices of tensors were read."""
    remaining = iter(range(after))
    read = SafetensorsCheckpoint.read

    def failing(checkpoint: SafetensorsCheckpoint, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if next(remaining, None) is None:
            raise OSError("the disk is gone")
        return read(checkpoint, name, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsCheckpoint, "read", failing)
        yield


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())
