"""Names of models become folders. What concerns the Hub runs in processes of its own, as its library reads settings once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import SHA, fake_hub

from jaxserve.demo import demo_model_path
from jaxserve.models import model_folder

NAME = "org/tiny"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "chat_template.jinja": b"{{ x }}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same once more",
    "pytorch_model.bin": b"and once more",
    "onnx/config.json": b"{  }",
    "1_Pooling/config.json": b"{   }",
    "2_Dense/model.safetensors": b"a matrix",
    "2_Dense/pytorch_model.bin": b"the same once more",
    "4bit/model.safetensors": b"and once more",
    "0_Transformer/onnx/config.json": b"{    }",
    "README.md": b"# tiny",
}
TAKEN = {
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors",
    "1_Pooling/config.json",
    "2_Dense/model.safetensors",
}
NOBODY = "http://127.0.0.1:9"  # where nothing listens


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == str(tmp_path)


def test_demo_is_the_model_that_comes_with_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_folder("demo") == demo_model_path()
    (tmp_path / "demo").mkdir()
    assert model_folder("demo") == "demo", "a folder of that name comes first"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "A model is needed: a folder, demo, or a name on the Hugging Face Hub"),
        ("nowhere", "The model folder 'nowhere' does not exist. A name on the Hugging Face Hub has the form org/name."),
        ("/no/where", "The model folder '/no/where' does not exist."),
        ("./no/where", "The model folder './no/where' does not exist."),
        ("a/b/c", "The model folder 'a/b/c' does not exist."),
        ("../b", "The model folder '../b' does not exist."),
        ("file", "The model folder 'file' is a file."),
    ],
)
def test_what_can_be_no_name_on_the_hub_is_a_missing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 — the sentence is compared below
        model_folder(name)
    assert str(caught.value).startswith(says)
    if name:
        with pytest.raises(ValueError, match=f"The tokenizer folder '{name}'"):
            model_folder(name, what="tokenizer")


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path), "demo"):
        with pytest.raises(ValueError, match=r"--revision 'v1' is of a model on the Hugging Face Hub, and '.*' is none"):
            model_folder(name, "v1")


_ASK = """
import sys
from jaxserve.models import model_folder
try:
    print(model_folder(sys.argv[1], sys.argv[2] or None, weights=sys.argv[3] == "weights", download_dir=sys.argv[4] or None))
except ValueError as error:
    print("ValueError:", error)
"""


def ask(
    home: Path, endpoint: str, name: str = NAME, revision: str = "", weights: bool = True, into: str = "", **environment: str
) -> str:
    own = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
    unset = {"HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}
    env = {key: value for key, value in os.environ.items() if key not in unset} | own | environment
    command = [sys.executable, "-c", _ASK, name, revision, "weights" if weights else "", into]
    result = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert "\r" not in result.stderr, "a progress bar in a pipe"
    return result.stdout.strip()


def snapshot(home: Path) -> Path:
    return home / "hub" / "models--org--tiny" / "snapshots" / SHA


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_name_on_the_hub_is_fetched_once(tmp_path: Path) -> None:
    with fake_hub({NAME: FILES}) as (url, asked):
        assert ask(tmp_path, url) == str(snapshot(tmp_path))
        assert files(snapshot(tmp_path)) == TAKEN
        assert (snapshot(tmp_path) / "model.safetensors").read_bytes() == b"weights"
        del asked[:]
        assert ask(tmp_path, url, revision="main") == str(snapshot(tmp_path))
        assert not [one for one in asked if "resolve" in one], "its files are there"
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert ask(tmp_path, NOBODY, **more) == str(snapshot(tmp_path)), "without the Hub"


def test_a_name_on_the_hub_is_fetched_into_a_folder(tmp_path: Path) -> None:
    into = tmp_path / "models"
    with fake_hub({NAME: FILES}) as (url, _):
        assert ask(tmp_path, url, into=str(into)) == str(into / "models--org--tiny" / "snapshots" / SHA)
    assert not snapshot(tmp_path).exists()
    assert f"in the cache {into}, and" in ask(tmp_path, NOBODY, "org/other", into=str(into))


def test_without_weights_the_small_files_are_fetched(tmp_path: Path) -> None:
    with fake_hub({NAME: FILES}) as (url, _):
        ask(tmp_path, url, weights=False)
    assert files(snapshot(tmp_path)) == {name for name in TAKEN if not name.endswith(".safetensors")}


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("org/gone", "", "there is none of that name, or it is private: then set HF_TOKEN."),
        ("org/gated", "", "it asks for an agreement: accept it there and set HF_TOKEN."),
        (NAME, "v9", "it has no revision 'v9'."),
    ],
)
def test_what_the_hub_refuses_is_said(tmp_path: Path, name: str, revision: str, says: str) -> None:
    with fake_hub({NAME: FILES}) as (url, _):
        said = ask(tmp_path, url, name, revision)
    assert said == f"ValueError: {name!r} is no folder here, and on the Hugging Face Hub {says}"


@pytest.mark.parametrize(
    ("environment", "hub"), [({}, "cannot be reached"), ({"HF_HUB_OFFLINE": "1"}, "must not be asked (HF_HUB_OFFLINE)")]
)
def test_without_the_hub_and_a_snapshot_the_sentence_says_what_to_do(
    tmp_path: Path, environment: dict[str, str], hub: str
) -> None:
    said = ask(tmp_path, NOBODY, "Qwen/Qwen3-0.6B", **environment)
    assert said == (
        f"ValueError: 'Qwen/Qwen3-0.6B' is no folder here, not all of it is in the cache {tmp_path}/hub, and the Hugging Face "
        f"Hub {hub}. Where there is a network: hf download Qwen/Qwen3-0.6B --local-dir FOLDER; then name that folder."
    )
