from __future__ import annotations

from collections.abc import Iterator

import pytest
from host_harness import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.close()
