"""What a process does with Python's garbage collector while it imports and once it serves."""

from __future__ import annotations

import gc
import subprocess
import sys

from jaxserve.server.garbage import importing


def test_nothing_is_collected_during_imports_and_everything_is_afterwards() -> None:
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_the_scheduler_imports_orbax_only_for_its_checkpoints() -> None:
    script = "import sys, jaxserve.server.scheduler_process, jaxserve.executor; sys.exit('orbax.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 0
