"""One case of one section, alone in this process: `python -m benchmarks.device.probe SECTION CASE`. Prints its numbers.

What profilers and sanitizers are pointed at; useful by hand, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.device.case import Setting
from benchmarks.device.events import without_nan
from benchmarks.device.sections import SECTIONS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("section", choices=[section.name for section in SECTIONS])
    parser.add_argument("case")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    module = next(section.module for section in SECTIONS if section.name == options.section)
    cases = importlib.import_module(module).cases(Setting(options.smoke, Path()))
    wanted = [case for case in cases if case.name == options.case]
    if not wanted:
        parser.error(f"{options.section} has no {options.case!r}; it has {'; '.join(case.name for case in cases)}")
    numbers = wanted[0].prepare()()
    print(json.dumps(without_nan(numbers)))
    return 1 if numbers.get("status") == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
