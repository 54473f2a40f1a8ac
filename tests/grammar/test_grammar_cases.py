"""Random walks through the masks of many grammars: what comes out whole is valid, judged by an independent parser."""

from __future__ import annotations

import numpy as np
import pytest
from grammar_cases import CASES, Case
from grammar_sampler import GrammarSampler, allow_all, allowed_ids
from tokenizers import Tokenizer

from jaxserve.grammar import GrammarCompiler, JsonStyle

NUM_WALKS = 6
VOCAB_SIZE, EOS = 2080, (2041, 2042)


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


@pytest.mark.parametrize("any_whitespace", [True, False])
def test_masks_allow_what_is_forced_and_nothing_else(tokenizer_json: str, any_whitespace: bool) -> None:
    compiler = GrammarCompiler(tokenizer_json, VOCAB_SIZE, EOS, json_style=JsonStyle(any_whitespace=any_whitespace))
    mask, num_forced = allow_all(1, VOCAB_SIZE)[0], 0
    for case in CASES:
        matcher, rng = compiler.submit(case.grammar).result().matcher(), np.random.default_rng(1)
        for _ in range(40):
            forced = matcher.forced_tokens()
            for token in forced:
                matcher.fill_mask(mask)
                assert allowed_ids(mask).tolist() == [token], case.name
                assert matcher.accept(token)
            num_forced += len(forced)
            if matcher.is_terminated:
                break
            matcher.fill_mask(mask)
            assert matcher.accept(int(rng.choice(allowed_ids(mask))))
    assert num_forced > 280
    compiler.close()
