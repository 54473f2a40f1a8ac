"""The rules of a StepInput that a fake device checks."""

from __future__ import annotations

import numpy as np

from jaxserve.runner import RunnerSpec, StepInput
from jaxserve.types import ForwardMode


def check_step(step: StepInput, spec: RunnerSpec) -> None:
    """The rules of a StepInput that need no memory of earlier steps."""
    count = step.num_rows
    assert 0 < count <= spec.max_rows, f"{count} rows in a step, at most {spec.max_rows}"
    for name in ("rows", "seq_lens", "extend_lens", "input_ids"):
        assert getattr(step, name).dtype == np.int32, f"{name} is {getattr(step, name).dtype}"
    assert len(step.seq_lens) == len(step.extend_lens) == len(step.sample) == count, "arrays of different lengths"
    assert len(np.unique(step.rows)) == count, f"rows are not distinct: {step.rows.tolist()}"
    assert step.rows.min() >= 0 and step.rows.max() < spec.max_rows, f"rows out of range: {step.rows.tolist()}"
    assert (step.seq_lens <= spec.context_len).all(), f"a sequence of {step.seq_lens.max()} tokens"
    assert (step.extend_lens >= 1).all() and (step.extend_lens <= step.seq_lens).all(), "an extend length out of range"
    decode = step.num_decode_rows
    most = spec.num_draft_tokens if step.mode is ForwardMode.DECODE else 1
    assert (step.extend_lens[:decode] <= most).all() and step.sample[:decode].all(), "a decode row adds too many tokens"
    assert int(step.extend_lens[decode:].sum()) == len(step.input_ids), "input_ids do not match the extend lengths"
    assert (step.input_ids < (spec.num_token_ids or spec.vocab_size)).all(), f"token {step.input_ids.max()}"
    if step.mode is not ForwardMode.DECODE:
        assert step.num_tokens <= spec.max_step_tokens, f"{step.num_tokens} tokens in a step of {spec.max_step_tokens}"
    is_mode = {ForwardMode.DECODE: decode == count, ForwardMode.EXTEND: decode == 0, ForwardMode.MIXED: 0 < decode < count}
    assert is_mode[step.mode], f"{step.mode.name} with {decode} decode rows of {count}"
    assert {state.row for state in step.new_rows} <= set(step.rows[decode:].tolist()), "a new row takes no part in its step"
    for index, group in enumerate(spec.kv_groups):
        pages = step.page_updates.pages[step.page_updates.groups == index]
        if len(pages):
            low, high = int(pages.min()), int(pages.max())
            assert low >= 0 and high < group.num_pages, f"pages {low}..{high} of {group.num_pages}"
