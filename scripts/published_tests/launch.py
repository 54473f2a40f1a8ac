"""Our server where a foreign test starts theirs: the same options under the same names, but the demo model (`checkpoint`).

Options that tune a device, a library or the number of processes mean nothing here and are left out; so are those that switch on
what is always on here, or a feature that only some tests of a file use. Any other option that we lack is `NotOursError`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import httpx

from jaxserve.cli.serve import serve
from jaxserve.demo import demo_model_path
from scripts.published_tests.files import LARGE_VOCABULARY, OPTIONS
from scripts.published_tests.modules import NotOursError, environment, is_port_available

_OF_THEIR_DEVICES = """
    --attention-backend --cuda-graph-backend-prefill --cuda-graph-bs-decode --cuda-graph-max-bs --cuda-graph-max-bs-decode
    --decode-attention-backend --detokenizer-worker-num --device --disable-cuda-graph --disable-piecewise-cuda-graph
    --dist-init-addr --download-dir
    --dp-size --dtype --grammar-backend --mem-fraction-static --nnodes --node-rank --precompile-bs-paddings
    --precompile-token-paddings --prefill-attention-backend --sampling-backend --tokenizer-worker-num --tp --tp-size
    --use-sort-for-toppk-minp
"""
_OF_SOME_TESTS = """
    --enable-deterministic-sampling --enable-metrics --enable-metrics-for-all-schedulers --enable-torch-compile
"""
_LISTS = ("--lora-paths", "--lora-target-modules")  # words there, with commas here
_ALWAYS_ON = "--enable-streaming-session"
_OLDER_NAMES = {"--stream-output": "--incremental-streaming-output"}


def _lack(name: str) -> NoReturn:
    raise NotOursError(f"needs the option {name}")


# Environment variables of theirs: options here, or nothing we have. The last one forces retractions.
_OF_ENVIRONMENT: dict[str, Callable[[Any], list[str]]] = {
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": lambda _: _lack("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"),
    "SGLANG_REQ_RUNNING_TIMEOUT": lambda value: ["--request-running-timeout-s", str(value)],
    "SGLANG_REQ_WAITING_TIMEOUT": lambda value: ["--request-waiting-timeout-s", str(value)],
    "SGLANG_RETURN_ORIGINAL_LOGPROB": lambda value: [] if str(value) == "True" else ["--logprobs-after-temperature"],
    "SGLANG_TEST_RETRACT": lambda _: _lack("SGLANG_TEST_RETRACT"),
}
_SMALL = (
    ("--max-running-requests", "8"),  # steps of many rows and a large vocabulary take seconds on two cores
    ("--json-model-override-args", '{"max_position_embeddings": 16384}'),
)
_LEFT_OUT = frozenset((_OF_THEIR_DEVICES + _OF_SOME_TESTS + _ALWAYS_ON).split())


def known_options() -> set[str]:
    return {name for parameter in serve.params for name in parameter.opts}


def _file() -> str:
    return pathlib.Path(os.environ["PUBLISHED_TESTS_FILE"]).name


def served_model() -> str:
    return os.environ["PUBLISHED_TESTS_MODEL"] if _file() in LARGE_VOCABULARY else demo_model_path()


def options_of_file() -> tuple[tuple[str, str], ...]:
    """What a server of this file is given unless the test says otherwise."""
    return (*_SMALL, *OPTIONS.get(_file(), ()))


def options_of_environment(env: Mapping[str, str]) -> list[str]:
    """What the environment variables of theirs say that are set. Raises NotOursError."""
    options: list[str] = []
    for variable, value in (os.environ | dict(env) | environment.now).items():
        options += _OF_ENVIRONMENT[variable](value) if variable in _OF_ENVIRONMENT else []
    return options


def translate(theirs: Sequence[Any]) -> list[str]:
    """The options that we have, with their values. Raises NotOursError. Names may be abbreviated, as argparse permits."""
    known = known_options()
    ours: list[str] = []
    keep, name = False, ""
    for word in map(str, theirs):
        if not word.startswith("--"):
            if name in _LISTS and ours[-1] != name:
                ours[-1] += f",{word}"
            else:
                ours += [word] if keep else []
            continue
        name, _, value = word.partition("=")
        name = _OLDER_NAMES.get(name, name)
        if name not in known and name not in _LEFT_OUT:
            name = next((full for full in sorted({*known, *_LEFT_OUT}) if full.startswith(name)), name)
        keep = name in known and name not in _LEFT_OUT
        if not keep and name not in _LEFT_OUT:
            _lack(name)
        ours += [name, *([value] if value else [])] if keep else []
    return ours


def popen_launch_server(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[Any] | None = None,
    env: dict[str, str] | None = None,
    return_stdout_stderr: tuple[Any, Any] | None = None,
    **_: Any,
) -> subprocess.Popen[bytes]:
    """With the arguments of theirs. The server goes by the name of the model the test asks for."""
    options = translate(other_args or ()) + options_of_environment(env or {})
    port = int(base_url.rpartition(":")[2].rstrip("/"))
    if not is_port_available(port):
        raise RuntimeError(f"port {port} is in use: another run? CUDA_VISIBLE_DEVICES=1 gives this one other ports")
    for option, default in options_of_file():
        options += [] if option in options else [option, default]
    command = [sys.executable, "-m", "jaxserve", "serve", "--model-path", served_model(), "--served-model-name", str(model)]
    command += ["--port", str(port), *(["--api-key", api_key] if api_key else []), *options]
    out, error = return_stdout_stderr or (None, None)
    log_path = pathlib.Path(os.environ["PUBLISHED_TESTS_LOG"])
    with log_path.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdout=out or log, stderr=error or log)
    deadline_s = time.monotonic() + timeout
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at its start with {' '.join(options)}: {_last_line(log_path)}")
        try:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            if httpx.get(base_url + "/ready", headers=headers, timeout=5).status_code == 200:
                return process
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    process.kill()
    raise TimeoutError(f"the server was not ready after {timeout:g} s")


def _last_line(log: pathlib.Path) -> str:
    return next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
