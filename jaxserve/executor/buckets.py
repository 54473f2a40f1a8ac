"""Which step shapes are compiled, and which one a step runs in.

Every reachable step fits a bucket, so nothing compiles while serving. Few buckets start fast, many waste little padding:
powers of 4 for prefill tokens, powers of 2 for decode rows (from 8 on GPUs): padding rows cost memory traffic on accelerators,
and arithmetic on CPUs.
"""

from __future__ import annotations

import dataclasses

from jaxserve.executor.deal import Shards
from jaxserve.executor.forward_batch import Bucket
from jaxserve.runner import StepInput

SMALLEST_TOKEN_BUCKET = 16
# Prefill steps carry few rows, mostly, and every row slot costs a line of logits; so there are buckets for few rows. Those
# for many rows begin at this token count: many very short prompts at once are rare, and run in the smallest of them.
FEW_ROWS = 8
MANY_ROWS_MIN_TOKENS = 256


def powers_up_to(first: int, factor: int, last: int) -> tuple[int, ...]:
    """first, first*factor, ... below `last`, then `last`."""
    sizes, size = [], first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


@dataclasses.dataclass(frozen=True)
class Buckets:
    decode: tuple[Bucket, ...]  # by increasing rows
    extend: tuple[Bucket, ...]  # by increasing tokens of all shards; of as many, what is cheapest comes first

    @staticmethod
    def build(
        token_sizes: tuple[int, ...],
        row_sizes: tuple[int, ...],
        page_size: int,
        num_draft_tokens: int = 1,
        num_kv_groups: int = 1,
        num_shards: int = 1,
        *,
        decodes: bool = True,
    ) -> Buckets:
        """`token_sizes` must reach the largest prefill step, `row_sizes` the most rows, of all shards together."""
        row_sizes = tuple(dict.fromkeys(-(-rows // num_shards) for rows in row_sizes))
        max_rows = row_sizes[-1]
        new_pages = num_kv_groups * -(-num_draft_tokens // page_size)  # that a decode row can open in one step
        decode = tuple(
            Bucket(rows * num_draft_tokens, rows, rows * new_pages, decode_only=True, num_shards=num_shards)
            for rows in (row_sizes if decodes else ())
        )

        def of(tokens: int, rows: int, *, packs_tokens: bool = False) -> Bucket:
            # Each row can open one page more than its tokens fill, and pages of a prefix hit come on top of that.
            updates = num_kv_groups * (-(-tokens // page_size) + 2 * rows)
            return Bucket(tokens, rows, updates, decode_only=False, num_shards=num_shards, packs_tokens=packs_tokens)

        extend = []
        for tokens in token_sizes:
            each = -(-tokens // num_shards)
            row_counts = {min(FEW_ROWS, each, max_rows)}
            if tokens >= MANY_ROWS_MIN_TOKENS or tokens == token_sizes[-1]:
                row_counts.add(min(each, max_rows))
            extend += [of(each, rows) for rows in sorted(row_counts)]
            if num_shards > 1:  # for steps whose tokens are one shard's, or nearly
                total = each * num_shards
                extend.append(of(total, min(total, max_rows), packs_tokens=True))
        return Buckets(decode, tuple(dict.fromkeys(extend)))

    @staticmethod
    def one(size: int, page_size: int, num_kv_groups: int, *, adapts: bool) -> Buckets:
        """A single one, of `size` tokens and rows, for steps of every kind: what a token gets is computed by one program then,
        in the same order, whatever comes with it."""
        updates = num_kv_groups * (-(-size // page_size) + 2 * size)
        return Buckets((), (Bucket(size, size, updates, decode_only=False, adapts=adapts),))

    @property
    def largest(self) -> tuple[Bucket, ...]:
        """Those that hold every step: of prompts, and if there are any of rows that decode."""
        return (*self.extend[-1:], *self.decode[-1:])

    @property
    def all(self) -> tuple[Bucket, ...]:
        return self.extend + self.decode

    def choose(self, step: StepInput, shards: Shards) -> Bucket:
        """The smallest bucket the step fits in (page updates aside: what does not fit is written beforehand)."""
        places = shards.fullest(step)
        if step.num_decode_rows == step.num_rows:
            for bucket in self.decode:
                if places.rows <= bucket.num_rows:
                    return bucket
        for bucket in self.extend:
            tokens = step.num_tokens if bucket.packs_tokens else places.tokens
            if tokens <= bucket.num_tokens and places.rows <= bucket.num_rows:
                return bucket
        raise AssertionError(f"no bucket holds {step.num_rows} rows and {step.num_tokens} tokens: {self.all}")
