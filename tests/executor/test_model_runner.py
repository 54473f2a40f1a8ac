"""A real runner on a tiny checkpoint, driven by hand: no scheduler, no cache, pages chosen here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from checkpoints import load_model
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config import ServerArgs
from jaxserve.executor import ModelRunner, build_runner
from jaxserve.runner import NO_TOKEN_ID, EmbeddedTokens, LogitLines, PageUpdates, RowState, ScoreQuery, StepInput, launch
from jaxserve.types import ForwardMode, SamplingParams

PAGE_SIZE = 1
NOTHING = np.zeros(0, np.int32)
PAGES = [field.name for field in dataclasses.fields(PageUpdates)]


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("qwen3")


@pytest.fixture(scope="module")
def args(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ServerArgs:
    return ServerArgs(
        model_path=str(model),
        page_size=PAGE_SIZE,
        max_total_tokens=1000,
        max_running_requests=4,
        context_length=300,
        chunked_prefill_size=16,
        enable_return_hidden_states=True,
        enable_custom_logit_processor=True,
        decode_row_buckets=(4,),
        compilation_cache_dir=str(tmp_path_factory.mktemp("cache")),
    )


@pytest.fixture(scope="module")
def runner(args: ServerArgs) -> ModelRunner:
    return build_runner(args, show_progress=False).runner


def row_state(row: int, prompt_len: int, **sampling: object) -> RowState:
    params = SamplingParams(temperature=0, **sampling)  # type: ignore[arg-type]
    return RowState(row, params, seed=0, prompt_len=prompt_len, stop_token_ids=NOTHING, output_ids=NOTHING, token_ids=NOTHING)


def step(
    row: int, start: int, tokens: list[int], pages: list[int], *, new: RowState | None = None, decode: bool = False
) -> StepInput:
    """`tokens` at positions start.. of one row; `pages` are entered into its page table from `start` on."""
    count = 1 if decode else len(tokens)
    return StepInput(
        mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
        rows=ints(row),
        seq_lens=ints(start + count),
        extend_lens=ints(count),
        num_decode_rows=int(decode),
        input_ids=NOTHING if decode else ints(*tokens),
        sample=np.asarray([True]),
        page_updates=PageUpdates.of(
            np.full(len(pages), row, np.int32), np.arange(start, start + len(pages), dtype=np.int32), ints(*pages)
        ),
        new_rows=[new] if new else [],
        needs_sampling=False,
        needs_adjusting=bool(new and new.sampling.has_penalties),
        needs_logprobs=False,
        needs_top_logprobs=False,
    )


def run(runner: ModelRunner, request: StepInput) -> int:
    return int(runner.fetch(launch(runner, request)).token_ids[0, 0])


def oracle(model: Path, prompt: list[int], count: int) -> list[int]:
    torch_model = load_model(model)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(torch_model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_prefill_in_chunks_and_decode_from_device_tokens(runner: ModelRunner, model: Path) -> None:
    prompt = list(range(10, 30))
    pages = list(range(500, 530))
    launch(runner, step(1, 0, prompt[:16], pages[:16], new=row_state(1, 20)))
    pending = [launch(runner, step(1, 16, prompt[16:], pages[16:20]))]
    # Launched without waiting: each reads on the device what the one before sampled.
    pending += [launch(runner, step(1, 20 + i, [], pages[20 + i : 21 + i], decode=True)) for i in range(5)]
    tokens = [int(runner.fetch(handle).token_ids[0, 0]) for handle in pending]
    assert tokens == oracle(model, prompt, 6)


def test_more_page_updates_than_a_step_carries(runner: ModelRunner, model: Path) -> None:
    """A prefix of 250 tokens, computed in one row, is shared by another row that only brings its last token."""
    prompt = [3 + i % 250 for i in range(251)]
    pages = list(range(251))
    for start in range(0, 250, 16):
        end = min(start + 16, 250)
        launch(runner, step(0, start, prompt[start:end], pages[start:end], new=row_state(0, 250) if start == 0 else None))
    shared = dataclasses.replace(
        step(3, 250, prompt[250:], [], new=row_state(3, 251)),
        page_updates=PageUpdates.of(np.full(251, 3, np.int32), np.arange(251, dtype=np.int32), ints(*pages[:250], 900)),
    )
    assert run(runner, shared) == oracle(model, prompt, 1)[0]


def test_logits_are_read_and_changed_between_the_halves(runner: ModelRunner, model: Path) -> None:
    prompts = {0: [20, 21, 22], 1: [30, 31], 3: [40, 41, 42, 43]}
    with torch.inference_mode():
        expected = {row: load_model(model)(torch.tensor([ids])).logits[0, -1].numpy() for row, ids in prompts.items()}
    parts = [step(row, 0, ids, [700 + 8 * row + i for i in range(len(ids))]) for row, ids in prompts.items()]
    whole = dataclasses.replace(
        parts[0],
        new_rows=[row_state(row, len(ids)) for row, ids in prompts.items()],
        sample=np.ones(3, bool),
        page_updates=PageUpdates(*(np.concatenate([getattr(part.page_updates, name) for part in parts]) for name in PAGES)),
        **{
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "seq_lens", "extend_lens", "input_ids")
        },
    )
    handle = runner.forward(whole)
    read = runner.read_logits(handle, ints(2, 0))
    np.testing.assert_allclose(read, [expected[3], expected[0]], atol=2e-4)
    read[0, 7], read[1] = 100.0, -np.inf
    read[1, 9] = 0.0
    runner.sample(handle, changed=LogitLines(ints(2, 0), read))
    assert runner.fetch(handle).token_ids[:, 0].tolist() == [9, int(expected[1].argmax()), 7]


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_any_number_of_lines_is_moved(runner: ModelRunner, count: int) -> None:
    logits = np.random.default_rng(count).normal(size=(4, runner.spec.vocab_size)).astype(np.float32)
    stage = runner._pipeline.own[-1]
    on_device = jax.device_put(logits, NamedSharding(stage.mesh, PartitionSpec()))
    lines = np.arange(count, dtype=np.int32) % 4
    read = np.concatenate([np.asarray(part) for part in stage.read_logits(on_device, lines)])
    np.testing.assert_array_equal(read[:count], logits[lines])
    changed = logits[::-1]
    written = stage.write_logits(on_device, LogitLines(lines[:4], changed[: len(lines[:4])]))
    np.testing.assert_array_equal(np.asarray(written)[: len(lines[:4])], changed[: len(lines[:4])])
    assert runner.internal_state()["compiles_after_ready_total"] == 0


def test_logprobs_come_only_when_asked_for(runner: ModelRunner) -> None:
    request = step(2, 0, [5, 6, 7], [300, 301, 302], new=row_state(2, 3))
    plain = runner.fetch(launch(runner, request))
    assert plain.logprobs is None
    assert plain.top_ids is None
    asked = runner.fetch(launch(runner, dataclasses.replace(request, needs_logprobs=True, needs_top_logprobs=True)))
    assert asked.logprobs is not None
    assert asked.top_ids is not None
    assert asked.top_logprobs is not None
    assert asked.top_ids[0, 0, 0] == plain.token_ids[0, 0]
    assert asked.top_logprobs[0, 0, 0] == pytest.approx(asked.logprobs[0, 0])
    assert np.all(np.diff(asked.top_logprobs[0, 0]) <= 0)


@pytest.mark.parametrize("num_ids", [0, 5, 40], ids=lambda count: f"{count} ids")
def test_scores_and_hidden_states_of_a_prompt_in_chunks(runner: ModelRunner, model: Path, num_ids: int) -> None:
    prompt = list(range(40, 65))
    ids = np.random.default_rng(0).permutation(runner.spec.vocab_size)[:num_ids].astype(np.int32)
    pages = list(range(600, 625))
    found, hidden = [], []
    for start, end in ((0, 16), (16, 25)):
        request = step(2, start, prompt[start:end], pages[start:end], new=None if start else row_state(2, 25))
        slots = np.arange(end - start, dtype=np.int32)
        query = ScoreQuery(slots, ints(*prompt[start + 1 : end], 7), np.tile(ids, (len(slots), 1)), needs_top=True)
        output = runner.fetch(launch(runner, dataclasses.replace(request, score_query=query, hidden_slots=slots)))
        assert output.scores is not None and output.hidden_states is not None
        found.append(output.scores)
        hidden.append(output.hidden_states)
    with torch.inference_mode():
        answer = load_model(model)(torch.tensor([prompt]), output_hidden_states=True)
    expected = answer.logits[0].log_softmax(-1).numpy()
    targets = [*prompt[1:16], 7, *prompt[17:], 7]
    np.testing.assert_allclose(
        np.concatenate([scores.logprobs for scores in found]), expected[np.arange(25), targets], atol=1e-3
    )
    top_ids = np.concatenate([scores.top_ids for scores in found if scores.top_ids is not None])
    top = np.concatenate([scores.top_logprobs for scores in found if scores.top_logprobs is not None])
    order = np.argsort(-expected, axis=-1)[:, : top_ids.shape[1]]
    assert (top_ids == order).all()
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, -1), atol=1e-3)
    np.testing.assert_allclose(np.concatenate([scores.id_logprobs for scores in found]), expected[:, ids], atol=1e-3)
    np.testing.assert_allclose(np.concatenate(hidden), answer.hidden_states[-1][0].numpy(), atol=1e-3)


def embedded(request: StepInput, first_slot: int, values: np.ndarray) -> StepInput:
    """The same step, with so many of its tokens given as embeddings."""
    ids = request.input_ids.copy()
    first = first_slot - request.num_decode_rows
    ids[first : first + len(values)] = NO_TOKEN_ID
    return dataclasses.replace(request, input_ids=ids, embeds=[EmbeddedTokens(first_slot, values)])


def test_a_prompt_of_embeddings_in_chunks(runner: ModelRunner, model: Path) -> None:
    """The model's own embeddings give what their ids give."""
    prompt = list(range(70, 95))
    pages = list(range(700, 730))
    with torch.inference_mode():
        table = load_model(model).get_input_embeddings()(torch.tensor(prompt)).numpy()
    for start, end in ((0, 16), (16, 25)):
        new = None if start else row_state(2, 25)
        chunk = step(2, start, [0] * (end - start), pages[start:end], new=new)
        token = run(runner, embedded(chunk, 0, table[start:end]))
    tokens = [token, *(run(runner, step(2, 25 + i, [], pages[25 + i : 26 + i], decode=True)) for i in range(4))]
    assert tokens == oracle(model, prompt, 5)


def test_embeddings_of_no_token_beside_a_decode_row_and_ids(runner: ModelRunner, model: Path) -> None:
    others, prompt = list(range(100, 106)), list(range(30, 34))
    run(runner, step(0, 0, others, list(range(750, 756)), new=row_state(0, 6)))
    given = 3 * torch.randn(7, runner.spec.hidden_size, generator=torch.Generator().manual_seed(0))
    rows, lens = [0, 1, 3], [1, 4, 7]
    pages, table_rows = list(range(760, 772)), np.repeat(ints(*rows), lens)
    mixed = StepInput(
        mode=ForwardMode.MIXED,
        rows=ints(*rows),
        seq_lens=ints(7, 4, 7),
        extend_lens=ints(*lens),
        num_decode_rows=1,
        input_ids=ints(*prompt, *[0] * 7),
        sample=np.ones(3, bool),
        page_updates=PageUpdates.of(table_rows, ints(6, *range(4), *range(7)), ints(*pages)),
        new_rows=[row_state(1, 4), row_state(3, 7)],
        needs_sampling=False,
        needs_adjusting=False,
        needs_logprobs=True,
        needs_top_logprobs=False,
        hidden_slots=np.arange(5, 12, dtype=np.int32),
    )
    output = runner.fetch(launch(runner, embedded(mixed, 5, given.numpy())))
    with torch.inference_mode():
        answer = load_model(model)(inputs_embeds=given[None], output_hidden_states=True)
    logprobs = answer.logits[0, -1].log_softmax(-1)
    expected = [oracle(model, others, 2)[1], oracle(model, prompt, 1)[0], int(logprobs.argmax())]
    assert output.token_ids[:, 0].tolist() == expected
    assert output.logprobs is not None and output.hidden_states is not None
    assert output.logprobs[2, 0] == pytest.approx(float(logprobs.max()), abs=1e-3)
    np.testing.assert_allclose(output.hidden_states, answer.hidden_states[-1][0].numpy(), atol=1e-3)


def test_the_pool_is_updated_in_place(runner: ModelRunner) -> None:
    """The compiled steps alias the donated state and never copy the KV pool."""
    pool = runner.kv_pool[0].values
    shape = f"f32[{','.join(map(str, pool.shape))}]"
    for bucket in runner._buckets.all:
        program = runner._pipeline.own[-1].programs[bucket]
        text = program.as_text()
        assert "input_output_alias" in text
        copies = [line for line in text.splitlines() if " copy(" in line and line.strip().split(" = ")[1].startswith(shape)]
        assert not copies, f"{bucket.name}: {copies}"
        analysis = program.memory_analysis()
        assert analysis.alias_size_in_bytes >= pool.nbytes
        assert analysis.temp_size_in_bytes < pool.nbytes


def test_nan_logits_are_reported_and_do_not_stay(runner: ModelRunner) -> None:
    (healthy,) = runner.params
    request = step(2, 0, [5, 6, 7], [300, 301, 302], new=row_state(2, 3))
    expected = run(runner, request)
    norm = healthy["final_norm"]
    broken = jax.device_put(np.full(norm.shape, np.nan, norm.dtype), norm.sharding)  # put, not computed: nothing compiles
    runner.params = ({**healthy, "final_norm": broken},)
    try:
        assert run(runner, request) == -1
    finally:
        runner.params = (healthy,)
    assert run(runner, request) == expected


def test_nothing_compiled_after_warm_up(runner: ModelRunner) -> None:
    state = runner.internal_state()
    assert state["compiles_after_ready_total"] == 0
    assert state["compiles_total"] > 0
    assert state["memory_usage"]["token_capacity"] == 1000
    assert jax.devices()[0].platform == "cpu"


# --- after all that, since every compilation of this process is counted


def test_running_every_program_once_with_padding_changes_nothing(
    args: ServerArgs, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What accelerators do with each program before it serves."""
    monkeypatch.setattr(ModelRunner, "_on_cpu", False)
    drafting = args.replace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    runner = build_runner(drafting, show_progress=False).runner
    prompt = list(range(10, 22))
    tokens = [run(runner, step(1, 0, prompt, list(range(500, 512)), new=row_state(1, 12)))]
    assert tokens == oracle(model, prompt, 1)
    assert runner.internal_state()["fully_warm"]
