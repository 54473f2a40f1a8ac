"""Steps of models whose layers keep states, compiled from shapes alone: states in place, collectives, our kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.model_configs import QWEN3_NEXT_80B_A3B, write_config
from jaxserve.aot.hlo import expected_collectives
from jaxserve.aot.targets import parse_target
from jaxserve.config import ServerArgs
from jaxserve.executor.blueprint import Blueprint
from jaxserve.executor.mesh import make_mesh
from jaxserve.models import ModelConfig
from tests.accelerator.proofs import Facts

pytestmark = pytest.mark.compile

ROWS = 64
NUM_PAGES = 512
NARROW = {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 16384}  # the layers of a quarter of its depth are alike


@pytest.mark.parametrize(("topology", "tp_size"), [("h200:1", 1), ("h200:2", 2), ("v6e:2x2", 4)])
@pytest.mark.parametrize("kind", ["decode", "verify", "extend"])
def test_states_are_updated_in_place(
    topology: str, tp_size: int, kind: str, tmp_path: Path, prove: Callable[..., Facts]
) -> None:
    decodes = kind != "extend"
    if topology.startswith("v6e"):
        pytest.importorskip("libtpu", reason="pip install 'jax[tpu]' brings libtpu, which compiles for TPUs")
    config = ModelConfig.from_pretrained(write_config(tmp_path, {**QWEN3_NEXT_80B_A3B, **NARROW}))
    args = ServerArgs(
        model_path=str(tmp_path),
        tp_size=tp_size,
        max_running_requests=ROWS,
        decode_row_buckets=(ROWS,),
        chunked_prefill_size=1024,
        prefill_token_buckets=(1024,),
        **({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4} if kind == "verify" else {}),
    )
    blueprint = Blueprint.draw(args, config, make_mesh(tp_size, list(parse_target(topology).devices())))
    bucket = blueprint.buckets.decode[-1] if decodes else blueprint.buckets.extend[-1]
    lowered = blueprint.lower(bucket, blueprint.pages_each(NUM_PAGES))
    on_gpu = topology.startswith("h200")
    # Equal layers are one function of the module.
    assert lowered.as_text().count('name = "recurrent_step"') == (on_gpu and decodes)
    assert lowered.as_text().count('name = "scan_chunks"') == (on_gpu and not decodes)
    facts = prove(lowered)
    assert facts.collectives == expected_collectives(config, tp_size)
    states = blueprint.states
    assert states is not None
    whole = states.count * math.prod(states.arrays["heads"].shape)
    assert facts.aliased_bytes >= states.count * sum(array.nbytes for array in states.arrays.values())
    assert not [array for array in facts.copies if array.size >= whole], "the states are copied"
    # One row's states in the layers of this model are 6 MB.
    assert facts.temp_bytes < 400e6
