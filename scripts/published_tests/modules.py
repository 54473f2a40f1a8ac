"""Stands in for the packages that a foreign test imports: `sglang` and `sgl_jax`, of which only the test helpers are theirs.

`sglang.test...` is loaded from the checkout, unedited. Everything else of the package is made up: a module with any name one
asks for. What is made up may be imported, subclassed and, while modules are loaded, called (it is falsy); called by a test it
raises `NotOursError`, so that nothing passes because of it. A few functions that helpers really need are ours.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import signal
import socket
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from jaxserve.logit_processors import CustomLogitProcessor


class NotOursError(Exception):
    """A test uses a part of SGLang itself, not only its server."""


class _Anything(type):
    """The class of made-up names: attributes of one are made up as well."""

    is_loading = True

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return made_up(f"{cls.__qualname__}.{name}")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not _Anything.is_loading:
            raise NotOursError(f"uses {cls.__qualname__} of SGLang itself")
        return cls

    def __bool__(cls) -> bool:
        return False


def made_up(name: str) -> _Anything:
    return _Anything(name.rpartition(".")[2], (), {"__qualname__": name, "__mro_entries__": None} | {"__doc__": "made up"})


def loading_is_over() -> None:
    """From now on calls of what is made up are a test's."""
    _Anything.is_loading = False


def _keep_from_fetching() -> None:
    """Tests reach our server on this machine and nothing else."""
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "", "localhost", "127.0.0.1", "0.0.0.0", "::1"):
            raise NotOursError(f"fetches from {name}")
        return original(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo


def _kill_process_tree(parent_pid: int, include_parent: bool = True, skip_pid: int | None = None, **_: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(parent_pid)
        for process in [*parent.children(recursive=True), *([parent] if include_parent else [])]:
            if process.pid != skip_pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        if include_parent:
            psutil.wait_procs([parent], timeout=10)


def _retry(function: Callable[[], Any], *_: Any, **__: Any) -> Any:
    return function()


def is_port_available(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _tokenizer(*_: Any, **__: Any) -> Any:
    """Of the model that is served, whatever name the test has for it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(os.environ["PUBLISHED_TESTS_MODEL"])


class _Environment:
    """SGLang's environment variables: what tests set is for `launch` to translate."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        @contextlib.contextmanager
        def override(value: Any = None) -> Iterator[None]:
            before = self.now
            self.now = {**before, name: value}
            try:
                yield
            finally:
                self.now = before

        return types.SimpleNamespace(override=override, get=lambda default=None: default, set=lambda value: None)


environment = _Environment()


_REAL: dict[str, dict[str, Any]] = {
    "srt.utils": {
        "kill_process_tree": _kill_process_tree,
        "retry": _retry,
        "get_bool_env_var": lambda name, default="false": False,
        "get_device": lambda *_: "cpu",
        **{f"is_{what}": lambda: False for what in ("hip", "cuda", "npu", "xpu", "blackwell", "sm100_supported", "in_ci")},
    },
    "srt.utils.common_utils": {"retry": _retry, "get_bool_env_var": lambda name, default="false": False},
    "srt.utils.network": {"is_port_available": is_port_available},
    "srt.utils.hf_transformers_utils": {"get_tokenizer": _tokenizer},
    "srt.hf_transformers_utils": {"get_tokenizer": _tokenizer},
    "srt.environ": {"envs": environment},
    "srt.sampling.custom_logit_processor": {"CustomLogitProcessor": CustomLogitProcessor},
    "utils": {"is_in_ci": lambda: False, "normalize_base_url": lambda url, *_: url},
}


def complete_transformers() -> None:
    """With names that the version here has no longer: `test.runners` of older checkouts imports one, a test calls the other."""
    import transformers

    transformers.PreTrainedTokenizerBase.encode_plus = transformers.PreTrainedTokenizerBase.__call__  # type: ignore[method-assign]

    if not hasattr(transformers, "AutoModelForVision2Seq"):
        transformers.AutoModelForVision2Seq = made_up("transformers.AutoModelForVision2Seq")  # type: ignore[attr-defined]


class _MadeUpModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = made_up(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds everything under one package name."""

    def __init__(self, package: str, python_root: pathlib.Path) -> None:
        self._package = package
        self._root = python_root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != self._package:
            return None
        if rest.split(".")[0] == "test" and rest not in ("test", "test.ci.ci_register", "test.run_eval"):
            for file in (self._root / f"{name.replace('.', '/')}.py", self._root / name.replace(".", "/") / "__init__.py"):
                if file.is_file():
                    inner = [str(file.parent)] if file.name == "__init__.py" else None
                    return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inner)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MadeUpModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(_REAL.get(module.__name__.partition(".")[2], {}))
        if module.__name__.endswith("ci_register"):
            for backend in ("cuda", "amd", "cpu", "npu", "xpu", "musa", "mlx"):
                setattr(module, f"register_{backend}_ci", lambda *_, **__: None)


def install(package: str, python_root: pathlib.Path, also_missing: Sequence[str]) -> None:
    """`also_missing`: other packages that helpers import at their beginning and that need not be there."""
    _keep_from_fetching()
    sys.meta_path.insert(0, Finder(package, python_root))
    for name in also_missing:
        if importlib.util.find_spec(name) is None:
            sys.meta_path.append(Finder(name, pathlib.Path("/nowhere")))
