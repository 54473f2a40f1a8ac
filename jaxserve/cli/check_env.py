"""`jaxserve check-env`: what is installed, which devices JAX finds, and what is missing. Made to be pasted into a bug report.

JAX is asked in a process of its own: an accelerator runtime that hangs or crashes must not take the report with it.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import click
import psutil
from packaging.requirements import Requirement

from jaxserve.server.version import package_version

_DEVICES_TIMEOUT_S = 120
_ASK_JAX = """
import json, jax
devices = [{"id": d.id, "platform": d.platform, "kind": d.device_kind} for d in jax.devices()]
print("\\n" + json.dumps({"backend": jax.default_backend(), "devices": devices}))
"""
# Optional parts: what to show, then the distributions of which one makes it available.
_EXTRAS = {
    "CUDA (Mosaic GPU)": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "TPU (libtpu)": ("libtpu",),
}


@dataclasses.dataclass
class Finding:
    name: str
    value: str
    problem: str | None = None


@click.command("check-env", short_help="Show versions and devices, and what is missing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--skip-devices", is_flag=True, help="Do not start JAX to list its devices.")
def check_env(as_json: bool, skip_devices: bool) -> int:
    """Show versions and devices. The exit code is 1 if something jaxserve needs is missing or too old."""
    findings = [*_system(), *_packages(), *_extras()]
    if not skip_devices:
        findings += _devices()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            note = f"   <- {finding.problem}" if finding.problem else ""
            click.echo(f"{finding.name:<{width}}  {finding.value}{note}")
        click.echo(_summary(findings))
    return 1 if any(finding.problem for finding in findings) else 0


def _summary(findings: list[Finding]) -> str:
    num_problems = sum(finding.problem is not None for finding in findings)
    if num_problems:
        return f"\n{num_problems} of these must be mended before jaxserve runs here."
    backend = next((f" on {finding.value}" for finding in findings if finding.name == "backend"), "")
    return f"\nNothing is missing: jaxserve runs here{backend}. Try: jaxserve chat demo"


def _system() -> Iterator[Finding]:
    yield Finding("jaxserve", package_version())
    old = sys.version_info < (3, 11)
    yield Finding("python", platform.python_version(), "3.11 or newer is needed" if old else None)
    yield Finding("platform", platform.platform())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("cpus", f"{os.cpu_count()} ({usable} usable)")
    memory = psutil.virtual_memory()
    yield Finding("memory", f"{memory.total / 2**30:.1f} GiB ({memory.available / 2**30:.1f} available)")


def _packages() -> Iterator[Finding]:
    """Every distribution jaxserve requires, jaxlib with them."""
    try:
        lines = importlib.metadata.requires("jaxserve") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "unknown", "jaxserve is not installed; run `pip install .`")
        return
    requirements = [Requirement(line) for line in lines]
    needed = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    for requirement in [*needed, Requirement("jaxlib")]:
        version = _installed(requirement.name)
        if version is None:
            yield Finding(requirement.name, "-", "is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(requirement.name, version, f"{requirement.specifier} is needed")
        else:
            yield Finding(requirement.name, version)


def _extras() -> Iterator[Finding]:
    for name, distributions in _EXTRAS.items():
        found = [f"{one} {version}" for one in distributions if (version := _installed(one))]
        yield Finding(name, ", ".join(found) or "not installed")
    mosaic_gpu = importlib.util.find_spec("jax") is not None and _has_module("jax.experimental.mosaic.gpu")
    yield Finding("Mosaic GPU in jax", "yes" if mosaic_gpu else "no")


def _has_module(name: str) -> bool:
    """Whether the file is there; nothing is imported."""
    root = importlib.util.find_spec(name.partition(".")[0])
    parts = name.split(".")[1:]
    folders = list(root.submodule_search_locations or []) if root else []
    return any(os.path.isdir(os.path.join(folder, *parts)) for folder in folders)


def _devices() -> Iterator[Finding]:
    command = [sys.executable, "-c", _ASK_JAX]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding("devices", "-", f"JAX did not list its devices within {_DEVICES_TIMEOUT_S} s")
        return
    if answer.returncode != 0:
        last_line = (answer.stderr.strip() or "no message").splitlines()[-1]
        yield Finding("devices", "-", f"JAX cannot list its devices: {last_line}")
        return
    found = json.loads(answer.stdout.strip().splitlines()[-1])
    yield Finding("backend", found["backend"])
    for device in found["devices"]:
        yield Finding(f"device {device['id']}", f"{device['platform']} ({device['kind']})")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
