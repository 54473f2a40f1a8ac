"""Writes tests/deploy/rendered, what helm makes of the chart with each of its examples: `python scripts/render_chart.py`.

It needs helm; tests read the files and do not. `chart.sha256` there says of which sources they are.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "jaxserve"
RENDERED = ROOT / "tests" / "deploy" / "rendered"
DIGEST = RENDERED / "chart.sha256"
EXAMPLES = sorted(file.stem for file in (CHART / "examples").glob("*.yaml"))


def release(example: str) -> str:
    """The names of deploy/kubernetes, with which it is compared."""
    return "jaxserve-multihost" if example.startswith("multihost") else "jaxserve"


def sources_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(file for file in CHART.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(CHART).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def rendered(helm: str, example: str) -> str:
    """What helm says of an example, after its linter has accepted it."""
    values = ["--values", str(CHART / "examples" / f"{example}.yaml")]
    subprocess.run([helm, "lint", "--strict", "--quiet", str(CHART), *values], check=True)
    command = [helm, "template", release(example), str(CHART), *values]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> int:
    helm = shutil.which("helm")
    if helm is None:
        print("helm is not on the PATH.", file=sys.stderr)
        return 1
    RENDERED.mkdir(exist_ok=True)
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    for example in EXAMPLES:
        (RENDERED / f"{example}.yaml").write_text(rendered(helm, example))
    DIGEST.write_text(f"{sources_digest()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
