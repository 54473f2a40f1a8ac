"""Random walks through the masks of many grammars: what comes out whole is valid, judged by an independent parser."""

from __future__ import annotations

import numpy as np
import pytest
from grammar_cases import CASES, Case
from grammar_sampler import GrammarSampler
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler

NUM_WALKS = 6


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.grammar.kind}: {case.name}")
def test_every_complete_output_is_valid(
    case: Case, compiler: GrammarCompiler, sampler: GrammarSampler, tokenizer: Tokenizer, special_ids: set[int]
) -> None:
    compiled = compiler.submit(case.grammar).result()
    num_complete = 0
    for walk in range(NUM_WALKS):
        matcher = compiled.matcher(ignore_eos=walk == 0)
        drawn = sampler.draw(matcher, np.random.default_rng(walk), max_tokens=250, hurry_after=4 * walk)
        assert special_ids.isdisjoint(drawn.token_ids)
        if drawn.is_complete:
            num_complete += 1
            case.check(tokenizer.decode(drawn.token_ids, skip_special_tokens=False))
    assert num_complete >= NUM_WALKS // 2, f"{num_complete} of {NUM_WALKS} walks came to an end"
