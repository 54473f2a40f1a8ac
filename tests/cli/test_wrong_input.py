"""Whatever is wrong with what a command is given, it says so in one line and ends with 1 or 2. Real commands, real files."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import run
from jaxserve.demo import demo_model_path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("models") / "good"))


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`serve` sets up the logs of a process that is all its own; this one has other tests, whose stderr is another."""
    root, level, factory = logging.getLogger(), logging.getLogger().level, logging.getLogRecordFactory()
    monkeypatch.setattr(root, "handlers", [])
    for module, hook in ((sys, "excepthook"), (sys, "unraisablehook"), (threading, "excepthook")):
        monkeypatch.setattr(module, hook, getattr(module, hook))
    yield
    root.setLevel(level)
    logging.setLogRecordFactory(factory)
    logging.captureWarnings(False)


def config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**raw, **changes}))

    return change


def content(name: str, data: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        if data is not None:
            (folder / name).write_bytes(data)

    return change


def cut_in_half(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def folder_for_file(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (content("config.json", None), "config.json does not exist"),
    "broken config": (content("config.json", b"{"), "config.json is not valid JSON"),
    "binary config": (content("config.json", b"\xff\xfe\x00"), "config.json is not valid JSON"),
    "a list for a config": (content("config.json", b"[]"), "must hold a JSON object, got list"),
    "a folder for a config": (folder_for_file, "config.json does not exist"),
    "unknown architecture": (config(architectures=["FooForCausalLM"]), "architecture 'FooForCausalLM' is not supported"),
    "a word for a size": (config(hidden_size="many"), "hidden_size must be a whole number of at least 1, got 'many'"),
    "a word for an object": (config(rope_scaling="x"), "a value is of the wrong kind"),
    "another size": (config(hidden_size=128), "but config.json asks for"),
    "no weights": (content("model.safetensors", None), "holds no weights"),
    "empty weights": (content("model.safetensors", b""), "is cut off or not a safetensors file"),
    "half the weights": (cut_in_half, "is cut off or not a safetensors file"),
}


@pytest.mark.parametrize("case", MODELS)
def test_convert_names_what_is_wrong_with_a_model(
    case: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = MODELS[case]
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    change(folder)
    assert run(["convert", str(folder), "-o", str(tmp_path / "out")]) == 1
    expect_one_line(capsys, words)
    assert not (tmp_path / "out").exists()


OTHERS: dict[str, tuple[str, int, str]] = {
    "missing folder": ("convert {tmp}/missing -o {tmp}/out", 1, "missing"),
    "a file for a folder": ("convert {tmp}/file -o {tmp}/out", 1, "file"),
    "output below a file": ("convert demo -o {tmp}/file/out", 1, "Not a directory"),
    "output is a file": ("convert demo -o {tmp}/file", 2, "is a file"),
    "no model": ("serve", 2, "A model is needed"),
    "port in use": ("serve demo --port {port}", 1, "Is another server running? Choose another --port."),
    "unknown host": ("serve demo --host no.such.host.invalid --port 0", 1, "Cannot listen on no.such.host.invalid"),
    "no such topology": ("compile demo --topology h9000", 2, "h9000"),
    "config of a plan": ("compile {tmp} --topology h200 --programs none", 1, "config.json does not exist"),
    "cache below a file": ("compile demo --cache-dir {tmp}/file/cache", 1, "Not a directory"),
    "no such command": ("serv", 2, "No such command 'serv'"),
    "broken JSON": ("serve demo --json-model-override-args {{", 2, "must be a JSON object"),
    "bad address": ("chat --url http://", 1, "is not the address of a server"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_wrong_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, code, words = OTHERS[case]
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = line.format(tmp=tmp_path, port=taken.getsockname()[1]).split()
        assert run(arguments) == code
    expect_one_line(capsys, words)


def expect_one_line(capsys: pytest.CaptureFixture[str], words: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1, err


def test_a_full_disk_is_one_line_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """A file that may not grow fails as a disk does that is full: with an error of the system amid Orbax's threads."""

    convert = [sys.executable, "-m", "jaxserve", "convert", str(model), "-o", str(tmp_path / "out")]
    command = ["bash", "-c", 'ulimit -f 1024; exec "$0" "$@"', *convert]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"jaxserve: error: {tmp_path}/out/orbax cannot be written: File too large.\n"
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_known_before_anything_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    (tmp_path / "out").mkdir()
    assert run(["convert", str(model), "-o", str(tmp_path / "out")]) == 1
    expect_one_line(capsys, "0.01 GiB are needed, 0.00 GiB are free")
    assert list((tmp_path / "out").iterdir()) == []
