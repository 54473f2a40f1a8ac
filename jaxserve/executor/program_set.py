"""ProgramSet: which programs a server compiles, which of them it cannot serve without, and in which order the others follow.

A step can run in any program that is large enough: the largest buckets hold every step, and SamplingMode.EVERYTHING does what
all modes do. So few programs serve everything, and the others only save time. Knows keys, not programs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from jaxserve.executor.buckets import Buckets
from jaxserve.executor.forward_batch import Bucket
from jaxserve.executor.logit_lines import LogitsKey
from jaxserve.executor.pooling import PoolingKey
from jaxserve.executor.programs import ProgramKey, SamplingKey
from jaxserve.executor.sampler import SamplingMode
from jaxserve.executor.scoring import LINE_COUNTS, ScoringKey

# What most requests ask for, ahead of the other modes.
_FREQUENT_MODES = (SamplingMode.EVERYTHING, SamplingMode.GREEDY, SamplingMode.LIMITED)


@dataclasses.dataclass(frozen=True)
class ProgramSet:
    buckets: Buckets
    modes: tuple[SamplingMode, ...]  # EVERYTHING among them, where tokens are sampled
    drafts: bool
    hidden_states: bool = False
    routed_experts: bool = False
    moves_logits: bool = False
    embeds: bool = True  # False: of a pipeline, another stage does
    samples: bool = True
    pools: tuple[int, ...] = ()  # lines of the programs that make vectors, by increasing numbers
    pools_parts: bool = False  # texts may come in parts
    scoring_lines: tuple[int, ...] = LINE_COUNTS  # by increasing numbers
    adapts: bool = False  # steps may use LoRA adapters: those that do have programs of their own

    def of_stage(self, *, is_first: bool, is_last: bool) -> ProgramSet:
        """Those that a pipeline's stage needs."""
        return dataclasses.replace(
            self,
            modes=self.modes if is_last else (),
            drafts=self.drafts and is_last,
            hidden_states=self.hidden_states and is_last,
            routed_experts=self.routed_experts and is_last,
            moves_logits=self.moves_logits and is_last,
            embeds=is_first,
            samples=self.samples and is_last,
            pools=self.pools if is_last else (),
            pools_parts=self.pools_parts and is_last,
        )

    @property
    def others(self) -> tuple[str, ...]:
        """What there is one of."""
        names = ("page_table", *("row_tables",) * self.samples, *("input_embeds",) * self.embeds, "kv_pool", "empty_state")
        names += ("history",) * self.drafts + ("hidden_states",) * self.hidden_states
        names += ("routed_experts",) * self.routed_experts
        return names + ("empty_adapters", "adapter") * self.adapts + ("pooled_sums",) * self.pools_parts

    def _forward(self, buckets: Iterable[Bucket]) -> tuple[Bucket, ...]:
        """The forward halves of steps of these buckets."""
        return tuple(itertools.chain.from_iterable(self._variants(bucket) for bucket in buckets))

    @property
    def num_forward(self) -> int:
        return len(self._forward(self.buckets.all))

    def _variants(self, bucket: Bucket) -> tuple[Bucket, ...]:
        return (bucket, bucket.with_adapters) if self.adapts and not bucket.adapts else (bucket,)

    @property
    def _everything(self) -> tuple[SamplingMode, ...]:
        """The mode that does what all do, where tokens are sampled."""
        return (SamplingMode.EVERYTHING,) if self.samples else ()

    @property
    def scoring(self) -> tuple[ScoringKey, ...]:
        """By increasing lines."""
        return tuple(map(ScoringKey, self.scoring_lines)) if self.samples else ()

    @property
    def logit_lines(self) -> tuple[LogitsKey, ...]:
        """Each compiles in an instant."""
        return LogitsKey.all_of(self.buckets.all) if self.moves_logits else ()

    @property
    def pooling(self) -> tuple[PoolingKey, ...]:
        return tuple(map(PoolingKey, self.pools))

    @property
    def all(self) -> tuple[ProgramKey, ...]:
        """By kind; the forward halves first, which take longest to compile."""
        sampling = SamplingKey.all_of(self.buckets.all, self.modes)
        of_tokens: tuple[ProgramKey, ...] = (*self.scoring, *self.pooling, *self.logit_lines)
        return (*self._forward(self.buckets.all), *sampling, *of_tokens, *self.others)

    @property
    def essential(self) -> tuple[ProgramKey, ...]:
        """Those that serve every step."""
        largest = self.buckets.largest
        sampling = SamplingKey.all_of(largest, self._everything)
        return (*self._forward(largest), *sampling, *self.scoring[-1:], *self.pooling[-1:], *self.logit_lines, *self.others)

    @property
    def largest(self) -> tuple[ProgramKey, ...]:
        """Of each kind the one that takes most memory: two forward halves, then sampling and scoring, if that is done here."""
        forward = tuple(self._variants(bucket)[-1] for bucket in self.buckets.largest)
        if not self.samples:
            return forward
        return (*forward, SamplingKey.largest_of(self.buckets.decode or self.buckets.extend), self.scoring[-1])

    @property
    def for_short_prompts(self) -> tuple[ProgramKey, ...]:
        """What a start should have beside the essential ones if it is cached: the first request is short, and the largest
        prefill step would keep it waiting for a second or more."""
        smallest = self.buckets.extend[0]
        return (*self._variants(smallest), *SamplingKey.all_of((smallest,), self._everything))

    @property
    def later(self) -> tuple[ProgramKey, ...]:
        """The rest. A server that has just started has few requests, which large programs serve worst: so small come first."""
        few_rows = [bucket for bucket in self.buckets.extend if bucket.num_rows == self.buckets.extend[0].num_rows]
        pairs = itertools.zip_longest(self.buckets.decode, few_rows)
        shapes = [bucket for pair in pairs for bucket in pair if bucket is not None]
        shapes += [bucket for bucket in self.buckets.extend if bucket not in shapes]
        keys: list[ProgramKey] = []
        for bucket in shapes:
            frequent = _FREQUENT_MODES if self.samples else ()
            keys += [*self._variants(bucket), *(SamplingKey.of(bucket, mode) for mode in frequent)]
        keys += (*SamplingKey.all_of(shapes, self.modes), *self.scoring, *self.pooling)
        return tuple(key for key in dict.fromkeys(keys) if key not in self.essential)

    def served_by(self, present: Iterable[ProgramKey]) -> tuple[Buckets, dict[SamplingKey, SamplingKey]]:
        """With `present` compiled, the essential ones among them: the buckets that steps may use, and for each way to sample
        the program that does it."""
        have = set(present)

        def is_usable(bucket: Bucket) -> bool:
            return have.issuperset((*self._variants(bucket), *SamplingKey.all_of((bucket,), self._everything)))

        buckets = Buckets(tuple(filter(is_usable, self.buckets.decode)), tuple(filter(is_usable, self.buckets.extend)))
        chosen: dict[SamplingKey, SamplingKey] = {}
        for wanted in SamplingKey.all_of(buckets.all) if self.samples else ():
            modes = [mode for mode in SamplingMode if mode.value >= wanted.mode.value]
            chosen[wanted] = next(key for mode in modes if (key := wanted._replace(mode=mode)) in have)
        return buckets, chosen
