from __future__ import annotations

import dataclasses

import pytest

from jaxserve.executor.buckets import Buckets
from jaxserve.executor.program_set import ProgramSet
from jaxserve.executor.programs import ProgramKey, SamplingKey
from jaxserve.executor.sampler import SamplingMode

BUCKETS = Buckets.build((16, 64, 256), (1, 4, 16), page_size=16)
DRAFTING = Buckets.build((16, 64, 256), (1, 4, 16), page_size=16, num_draft_tokens=4)
SETS = [
    ProgramSet(BUCKETS, tuple(SamplingMode), drafts=False),
    ProgramSet(DRAFTING, tuple(SamplingMode), drafts=True, moves_logits=True),
]
ONE = ProgramSet(Buckets.one(64, 16, 1, adapts=True), tuple(SamplingMode), drafts=False, adapts=True, scoring_lines=(64,))


def test_steps_of_one_size_have_one_program() -> None:
    (bucket,) = ONE.buckets.all
    assert bucket.num_tokens == bucket.num_rows == 64 and bucket.adapts
    assert ONE.num_forward == 1 and [key.num_lines for key in ONE.scoring] == [64]
    assert {key for key in ONE.all if key == bucket} == {bucket}
    assert ONE.largest == (bucket, SamplingKey.of(bucket, SamplingMode.EVERYTHING), *ONE.scoring)
    assert set(ONE.essential) | set(ONE.later) == set(ONE.all)


@pytest.mark.parametrize("programs", SETS, ids=["plain", "drafts"])
def test_what_comes_first_and_later_is_everything_once(programs: ProgramSet) -> None:
    assert sorted(map(str, (*programs.essential, *programs.later))) == sorted(map(str, programs.all))


@pytest.mark.parametrize("programs", SETS, ids=["plain", "drafts"])
def test_the_essential_programs_serve_every_step(programs: ProgramSet) -> None:
    buckets, sampling = programs.served_by(programs.essential)
    assert buckets.decode == programs.buckets.decode[-1:]
    assert buckets.extend == programs.buckets.extend[-1:]
    for bucket in buckets.all:
        for mode in SamplingMode:
            key = SamplingKey.of(bucket, mode)
            assert sampling[key] == SamplingKey.of(bucket, SamplingMode.EVERYTHING)


@pytest.mark.parametrize("programs", SETS, ids=["plain", "drafts"])
def test_what_arrives_is_used_from_then_on(programs: ProgramSet) -> None:
    """At any time every way to sample has a program that does all of it, and no bucket is used before its sampling is there."""
    present: list[ProgramKey] = list(programs.essential)
    for arrived in programs.later:
        present.append(arrived)
        buckets, sampling = programs.served_by(present)
        assert set(buckets.all) | set(sampling.values()) <= set(present)
        for wanted, chosen in sampling.items():
            assert chosen.mode.value >= wanted.mode.value
            assert wanted not in present or chosen == wanted
    assert buckets == programs.buckets
    assert all(wanted == chosen for wanted, chosen in sampling.items())


def test_logits_are_moved_only_where_users_bring_code() -> None:
    assert not SETS[0].logit_lines
    shapes = {bucket.num_rows * bucket.tokens_per_row for bucket in SETS[1].buckets.all}
    assert {key.num_lines for key in SETS[1].logit_lines if key.writes} == shapes
    assert {key.num_lines for key in SETS[1].logit_lines if not key.writes} == shapes


def test_small_shapes_come_before_large_ones() -> None:
    first = SETS[0].later[:8]
    assert first[0] == BUCKETS.decode[0]
    assert BUCKETS.extend[0] in first


def test_without_grammars_masks_have_no_program() -> None:
    modes = tuple(mode for mode in SamplingMode if mode is not SamplingMode.MASKED)
    programs = dataclasses.replace(SETS[0], modes=modes)
    assert not [key for key in programs.all if isinstance(key, SamplingKey) and key.mode is SamplingMode.MASKED]
    _, sampling = programs.served_by(programs.all)
    shape = SamplingKey.of(BUCKETS.decode[0], SamplingMode.MASKED)
    assert sampling[shape].mode is SamplingMode.EVERYTHING
