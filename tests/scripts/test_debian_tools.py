"""scripts/debian_tools.sh: what it does as root, with sudo, with neither, and where everything is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "debian_tools.sh"
PRESENT = ("chromium", "prometheus", "systemd-analyze")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder on the PATH, with those of the script's own programs that change nothing; apt-get tells its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sh").symlink_to("/bin/sh")
    add(folder, "apt-get", 'echo "apt-get $*"')
    return folder


def add(folder: Path, name: str, body: str = "exit 0") -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.read_text().replace("policy=/usr/sbin/", f"policy={folder}/")
    (folder / "script").write_text(script)
    command = ["/bin/sh", str(folder / "script")]
    for name in ("rm", "chmod"):
        if not (folder / name).exists():
            (folder / name).symlink_to(f"/bin/{name}")
    return subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, timeout=30, check=False)


def test_nothing_is_done_where_nothing_is_missing(programs: Path) -> None:
    for name in PRESENT:
        add(programs, name)
    done = run(programs)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_installs_what_is_missing_and_starts_no_service(programs: Path) -> None:
    add(programs, "id", "echo 0")
    add(programs, "chromium")
    add(programs, "apt-get", f'echo "apt-get $*"; {programs}/policy-rc.d; echo "a service may start: $?"')
    done = run(programs)
    assert done.returncode == 0, done
    install = "apt-get -q -o DPkg::Lock::Timeout=300 install -y --no-install-recommends prometheus systemd fonts-dejavu-core"
    assert install in done.stdout and "may start: 101" in done.stdout
    assert not (programs / "policy-rc.d").exists()


def test_others_use_sudo_if_it_asks_nothing(programs: Path) -> None:
    add(programs, "id", f'test -e {programs}/is-root && echo 0 || echo 1000')  # fmt: skip
    add(programs, "sudo", f'shift; : > {programs}/is-root; exec "$@"')
    add(programs, "true")
    done = run(programs)
    assert done.returncode == 0 and "install -y --no-install-recommends chromium prometheus systemd" in done.stdout, done


@pytest.mark.parametrize(("sudo", "apt", "reason"), [
    (None, "exit 0", "only root can install"),
    ("exit 1", "exit 0", "only root can install"),
    (None, None, "only Debian's apt-get installs here"),
])  # fmt: skip
def test_it_says_what_to_install_where_it_cannot(programs: Path, sudo: str | None, apt: str | None, reason: str) -> None:
    add(programs, "id", "echo 1000")
    if sudo is not None:
        add(programs, "sudo", sudo)
    if apt is None:
        (programs / "apt-get").unlink()
    done = run(programs)
    assert done.returncode == 1
    assert reason in done.stderr
    assert "apt-get install --no-install-recommends chromium prometheus systemd fonts-dejavu-core" in done.stderr


def test_a_registry_that_gives_nothing_is_named(programs: Path) -> None:
    add(programs, "id", "echo 0")
    add(programs, "apt-get", "exit 100")
    done = run(programs)
    assert done.returncode == 1 and "Debian's registry did not give" in done.stderr
