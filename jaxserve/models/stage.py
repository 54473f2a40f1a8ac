"""Stage: a part of a model's layers, for pipelines. The first stage embeds, the last one has the head."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Stage:
    first: int
    end: int  # the layer behind its last one
    num_layers: int  # of the model

    @property
    def layers(self) -> range:
        return range(self.first, self.end)

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers


def divide_layers(num_layers: int, num_stages: int, partition: Sequence[int] | None = None) -> tuple[Stage | None, ...]:
    """The stages, of as many layers as `partition` says, or of numbers that differ by one at most: the ends have fewer, since
    they embed and compute logits. (None,) for a single one. ValueError, with the numbers, if that is not possible."""
    if num_stages > num_layers:
        raise ValueError(f"--pp-size {num_stages} is more than the model has layers: {num_layers}.")
    if partition is not None and sum(partition) != num_layers:
        numbers = ",".join(map(str, partition))
        raise ValueError(f"--pp-layer-partition {numbers} has {sum(partition)} layers; the model has {num_layers}.")
    if num_stages == 1:
        return (None,)
    if partition is None:
        least, more = divmod(num_layers, num_stages)
        # Stages in the order in which they get one of the layers that are left: inner ones, then the first, then the last.
        order = [*range(1, num_stages - 1), 0, num_stages - 1]
        partition = [least + (order.index(stage) < more) for stage in range(num_stages)]
    ends = list(itertools.accumulate(partition))
    return tuple(Stage(end - size, end, num_layers) for size, end in zip(partition, ends, strict=True))
