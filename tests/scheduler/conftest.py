"""Harnesses that are closed when their test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scheduler_harness import Harness


@pytest.fixture
def make_harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(*args: Any, **kwargs: Any) -> Harness:
        made.append(Harness(*args, **kwargs))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
