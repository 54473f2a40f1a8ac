"""Our server where a foreign test starts theirs: the same options under the same names, but the demo model and its size.

Options that tune a device or a library of theirs mean nothing here and are left out; so are those that switch on a feature some
tests of a file use, since the other tests of that file need nothing of it. Any other option that we lack is `NotOurs`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import requests
from scripts.published_tests.modules import NotOurs

from jaxserve.cli.serve import serve
from jaxserve.demo import demo_model_path

_LEFT_OUT = frozenset(
    """--attention-backend --cuda-graph-bs-decode --cuda-graph-max-bs --cuda-graph-max-bs-decode --device --disable-cuda-graph
    --disable-piecewise-cuda-graph --download-dir --dtype --enable-custom-logit-processor --enable-metrics
    --enable-metrics-for-all-schedulers --enable-torch-compile --grammar-backend --mem-fraction-static --nnodes --node-rank
    --dist-init-addr --precompile-bs-paddings --precompile-token-paddings --sampling-backend --tp --tp-size --use-sort-for-toppk-minp
    --prefill-attention-backend --decode-attention-backend --enable-deterministic-sampling --dp-size""".split()
)


def known_options() -> set[str]:
    return {name for parameter in serve.params for name in parameter.opts}


def translate(theirs: Sequence[Any]) -> list[str]:
    """The options that we have, with their values. Raises NotOurs. Names may be abbreviated, as argparse permits."""
    known = known_options()
    ours: list[str] = []
    keep = False
    for word in map(str, theirs):
        if not word.startswith("--"):
            ours += [word] if keep else []
            continue
        name, _, value = word.partition("=")
        if name not in known and name not in _LEFT_OUT:
            name = next((full for full in sorted({*known, *_LEFT_OUT}) if full.startswith(name)), name)
        keep = name in known and name not in _LEFT_OUT
        if not keep and name not in _LEFT_OUT:
            raise NotOurs(f"needs the option {name}")
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
    options = translate(other_args or ())
    command = [sys.executable, "-m", "jaxserve", "serve", "--model-path", demo_model_path(), "--served-model-name", str(model)]
    command += ["--port", base_url.rpartition(":")[2].rstrip("/"), *(["--api-key", api_key] if api_key else []), *options]
    out, error = return_stdout_stderr or (None, None)
    with open(pathlib.Path(os.environ["PUBLISHED_TESTS_LOG"]), "ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(command, stdout=out or log, stderr=error or log)
    deadline_s = time.monotonic() + timeout
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at its start with {' '.join(options)}")
        try:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            if requests.get(base_url + "/ready", headers=headers, timeout=5).status_code == 200:
                return process
        except requests.RequestException:
            pass
        time.sleep(0.2)
    process.kill()
    raise TimeoutError(f"the server was not ready after {timeout:g} s")
