"""The commands themselves, with fake engines and servers."""

from __future__ import annotations

import http.server
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxserve.models
from jaxserve.cli import check_env, http_client
from jaxserve.cli.http_client import ServerError, stream_events
from jaxserve.cli.main import run
from jaxserve.config import ServerArgs
from jaxserve.demo import demo_model_path
from jaxserve.server.requests import RequestError


class FakeEngine:
    """Answers with the words of its prompt, in capitals; says what it was asked."""

    chat_template = "x"
    refuse = False

    def __init__(self, server_args: ServerArgs) -> None:
        if server_args.model_path == "broken":
            raise ValueError("The model\n    is broken.")
        self.server_args = server_args
        self.asked: list[dict[str, Any]] = []
        self.tokenizer = SimpleNamespace(
            chat_template=self.chat_template,
            apply_chat_template=lambda messages, **_: " ".join(message["content"] for message in messages),
            encode=lambda text, **_: text.split(),
        )
        ENGINES.append(self)

    def generate(self, *, stream: bool, **asked: Any) -> Iterator[dict[str, str]]:
        self.asked.append(asked)
        if self.refuse:
            raise RequestError("The prompt is too long.")
        words = asked["prompt"].split() if "prompt" in asked else asked["input_ids"]
        return ({"text": f"{word.upper()} "} for word in words)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        pass


ENGINES: list[FakeEngine] = []


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ENGINES.clear()
    monkeypatch.setattr("jaxserve.server.engine.Engine", FakeEngine)


def typed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


# --- generate


def test_generate_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "generate",
        "--model-path",
        "m",
        "--temperature",
        "0",
        "--max-new-tokens",
        "9",
        "--stop",
        "a",
        "--stop",
        "b",
        "one two",
    ]
    assert run(line) == 0
    assert capsys.readouterr().out == "ONE TWO \n"
    engine = ENGINES[0]
    assert engine.server_args.incremental_streaming_output
    assert engine.server_args.log_level == "warning"
    sampling = {"temperature": 0, "max_new_tokens": 9, "stop": ["a", "b"]}
    assert engine.asked == [{"prompt": "one two", "sampling_params": sampling}]


def test_generate_reads_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    typed(monkeypatch, "from a pipe")
    assert run(["generate", "--model-path", "m"]) == 0
    assert capsys.readouterr().out == "FROM A PIPE \n"
    assert ENGINES[0].asked[0]["sampling_params"] == {"stop": [], "max_new_tokens": None}


def test_failures_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--model-path", "broken", "x"]) == 1
    assert "jaxserve: error: The model is broken.\n" in capsys.readouterr().err
    monkeypatch.setattr(FakeEngine, "refuse", True)
    assert run(["generate", "--model-path", "m", "x"]) == 1
    assert "jaxserve: error: The prompt is too long.\n" in capsys.readouterr().err


# --- chat


def test_chat_keeps_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 0, "do_sample": true}')
    typed(monkeypatch, "hi\n\n/help\nyou\n/reset\nnew\n/exit\nnever\n")
    assert run(["chat", str(tmp_path), "--system", "sys", "--top-p", "0.9"]) == 0
    assert capsys.readouterr().out == "SYS HI \nSYS HI SYS HI YOU \nSYS NEW \n"
    sampling = {"temperature": 0.6, "top_k": -1, "top_p": 0.9, "stop": [], "max_new_tokens": None}
    assert ENGINES[0].asked[0]["sampling_params"] == sampling


def test_chat_needs_a_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(FakeEngine, "chat_template", None)
    typed(monkeypatch, "hi\n")
    assert run(["chat", "m"]) == 1
    assert "no chat template" in capsys.readouterr().err


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams the last message's letters; errors on demand. `starting` counts down the times that it is not ready."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        status, text = 200, b'{"data": [{"id": "letters"}]}'
        if self.path == "/ready" and self.server.starting:  # type: ignore[attr-defined]
            self.server.starting -= 1  # type: ignore[attr-defined]
            status = 503
        elif self.path == "/v1/models":
            key = self.server.key  # type: ignore[attr-defined]
            status = 200 if key in (None, self.headers.get("authorization")) else 401
            text = self.server.models or text  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers.get("authorization"), body))  # type: ignore[attr-defined]
        text = body["messages"][-1]["content"]
        self.send_response(418 if text == "teapot" else 200)
        self.end_headers()
        if text == "teapot":
            self.wfile.write(b'{"error": {"message": "I am a teapot."}}')
            return
        for letter in text:
            self._event({"choices": [{"delta": {"content": letter}}]})
        if text == "crash":
            self._event({"error": {"message": "Out of memory."}})
        if text != "cut":
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.asked = [], []  # type: ignore[attr-defined]
        server.starting, server.key, server.models = 0, None, None  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "address", ["http://{}", "http://{}/", "http://{}/v1", "{}", "{}/v1/", "http://{}/v1/chat/completions"]
)
def test_chat_with_a_server(
    server: Any, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "hello\n")
    url = address.format(f"127.0.0.1:{server.server_port}")
    assert run(["chat", "--url", url, "--api-key", "k", "--seed", "3", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == "hello\n"
    path, key, body = server.seen[0]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    messages = [{"role": "user", "content": "hello"}]
    assert body == {"model": "letters", "messages": messages, "stream": True, "seed": 3, "max_tokens": 5, "stop": []}
    assert server.asked == ["/ready", "/v1/models"]


def test_chat_waits_for_a_server_that_is_starting(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_client, "_POLL_S", 0.01)
    server.starting = 3
    typed(monkeypatch, "hello\n")
    assert run(["chat", "--url", f"localhost:{server.server_port}"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert err.count("is not ready yet; waiting for it.") == 1
    monkeypatch.setattr(http_client, "_TIMEOUT_S", 0.02)
    server.starting = 1_000_000
    assert run(["chat", "--url", f"localhost:{server.server_port}"]) == 1
    assert "did not become ready within 0.02 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "models", "words"),
    [
        (None, None, "wants a key: give --api-key."),
        ("wrong", None, "does not take this --api-key."),
        ("right", b"<html>", "does not answer /v1/models as OpenAI does"),
        ("right", b'{"data": []}', "does not answer /v1/models as OpenAI does"),
        ("right", b"3", "does not answer /v1/models as OpenAI does"),
        ("ri\nght", None, "does not answer /v1/models"),
    ],
)
def test_a_server_that_cannot_be_talked_to_is_known_before_the_first_line(
    server: Any, key: str | None, models: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    server.key, server.models = "Bearer right", models
    monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("nothing may be asked"))
    assert run(["chat", "--url", f"localhost:{server.server_port}", *(["--api-key", key] if key else [])]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_an_error_amid_a_conversation_leaves_it_usable(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["one", "crash", "cut", "teapot", "two"])

    def line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    assert run(["chat", "--url", f"localhost:{server.server_port}"]) == 0
    out, err = capsys.readouterr()
    assert out == "one\ncrashcuttwo\n"
    said = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    assert said == ["Out of memory.", "The server ended the stream before it was done.", "418: I am a teapot."]
    messages = server.seen[-1][2]["messages"]
    assert [message["content"] for message in messages] == ["one", "one", "two"], "what failed is taken back"


@pytest.mark.parametrize(("key", "sent"), [("k", b"k"), ("ключ", "ключ".encode()), ("voilà", "voilà".encode())])
def test_chat_takes_the_key_from_the_environment(server: Any, key: str, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(monkeypatch, "hello\n")
    monkeypatch.setenv("JAXSERVE_API_KEY", key)
    assert run(["chat", "--url", f"http://127.0.0.1:{server.server_port}"]) == 0
    assert server.seen[0][1].encode("latin-1") == b"Bearer " + sent


@pytest.mark.parametrize(
    ("text", "words"), [("teapot", "418: I am a teapot."), ("crash", "Out of memory."), ("cut", "before it was done")]
)
def test_a_servers_failures_are_sentences(server: Any, text: str, words: str) -> None:
    body = {"messages": [{"role": "user", "content": text}]}
    with pytest.raises(ServerError, match=words):
        list(stream_events(f"http://127.0.0.1:{server.server_port}/v1/chat/completions", body))


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    not_one = "is not the address of a server"
    for url, words in {
        "http://127.0.0.1:1": "No server answers at http://127.0.0.1:1: Connection refused.",
        "127.0.0.1:1": "No server answers at http://127.0.0.1:1: Connection refused.",
        "127.0.0.1:1/a b": "No server answers",
        "ftp://x": not_one,
        "http://": not_one,
        "localhost:port": not_one,
        "localhost:70000": not_one,
        "http://[x": not_one,
        "": not_one,
    }.items():
        monkeypatch.setattr("builtins.input", lambda prompt: pytest.fail("nothing may be asked"))
        assert run(["chat", "--url", url]) == 1
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1
    assert run(["chat", "m", "--url", "http://x"]) == 2


# --- convert, check-env, and the command itself


def test_convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calls: list[tuple[str, ...]] = []

    def convert(*args: str) -> None:
        calls.append(args)
        if args[2] == "float32":
            raise ValueError("There are no weights in it.")

    monkeypatch.setitem(vars(jaxserve.models), "convert", convert)
    out = str(tmp_path / "out")
    line = ["convert", "--model-path", str(tmp_path), "--output", out]
    assert run([*line, "--dtype", "bfloat16"]) == 0
    assert run(["convert", str(tmp_path), "-o", out, "--dtype", "bfloat16"]) == 0
    assert run(["convert", "demo", "-o", out]) == 0
    assert calls == [*[(str(tmp_path), out, "bfloat16")] * 2, (demo_model_path(), out, "auto")]
    assert f"jaxserve serve {out}" in capsys.readouterr().out
    assert run(["convert", "-o", out]) == 2
    assert "A model is needed" in capsys.readouterr().err
    assert run([*line, "--dtype", "float32"]) == 1
    assert "There are no weights in it." in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(["convert", "--model-path", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_check_env_lists_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check-env", "--skip-devices", "--json"]) == 0
    found = {one["name"]: one["value"] for one in json.loads(capsys.readouterr().out)}
    assert {"jaxserve", "python", "jax", "jaxlib", "flax", "transformers", "CUDA (Mosaic GPU)"} <= found.keys()


def test_check_env_fails_for_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    requires = ["jax>=999", "no-such-package", "torch; extra == 'dev'", "numpy"]
    monkeypatch.setattr(check_env.importlib.metadata, "requires", lambda name: requires)
    assert run(["check-env", "--skip-devices"]) == 1
    out = capsys.readouterr().out
    assert ">=999 is needed" in out
    assert "is missing" in out
    assert "torch" not in out
    assert out.endswith("2 of these must be mended before jaxserve runs here.\n")


def test_check_env_says_that_nothing_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = '{"backend": "cpu", "devices": [{"id": 0, "platform": "cpu", "kind": "cpu"}]}'
    monkeypatch.setattr(check_env.importlib.metadata, "requires", lambda name: ["numpy"])
    monkeypatch.setattr(check_env.subprocess, "run", lambda *args, **_: subprocess.CompletedProcess(args, 0, answer, ""))
    assert run(["check-env"]) == 0
    assert "Nothing is missing: jaxserve runs here on cpu." in capsys.readouterr().out


def test_check_env_survives_a_jax_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*args: Any, **kwargs: Any) -> Any:
        return subprocess.CompletedProcess(args, 1, "", "Traceback\nRuntimeError: no TPU")

    monkeypatch.setattr(check_env.subprocess, "run", crash)
    assert run(["check-env"]) == 1
    assert "JAX cannot list its devices: RuntimeError: no TPU" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert run(["--version"]) == 0
    assert run([]) == 2
    assert run(["serve", "-h"]) == 0
    assert "jaxserve" in capsys.readouterr().out


def test_the_servers_main_process_imports_no_jax() -> None:
    code = (
        "import sys; import jaxserve.__main__, jaxserve.cli.main, jaxserve.server.launch, jaxserve.server.engine;"
        "print([m for m in ('jax', 'torch', 'flax', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == "[]\n"
