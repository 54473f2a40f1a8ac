"""Compiles the programs of the sections `parity` and `model` for an H200, without one, for a machine to take along.

python -m benchmarks.device.carry [--out .device-programs]     (make device-programs)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.device import model, parity
from benchmarks.device.carried import ENVIRONMENT, FOLDER, of_model
from benchmarks.device.case import Setting
from benchmarks.device.driver import Plan, server_args

_TARGET = "h200"


def fill(folder: Path, target: Any, plans: Iterable[Plan]) -> None:
    from jaxserve.aot.carry import fill_cache_for
    from jaxserve.executor.environment import environment
    from jaxserve.executor.mesh import make_mesh

    for plan in plans:
        own = of_model(folder, plan)
        print(f"{own}: {fill_cache_for(target, server_args(plan), str(own))}", flush=True)
        (own / ENVIRONMENT).write_text(environment(make_mesh(1, list(target.devices()))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from jaxserve.aot.targets import parse_target

    fill(folder, parse_target(_TARGET), (parity.carried_plan(Setting()), model.carried_plan(Setting())))


if __name__ == "__main__":
    main()
