from __future__ import annotations

import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import xla_client
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.executor import executable_cache
from jaxserve.executor.compilation import _Compilation
from jaxserve.executor.compile_counter import CompileCounter
from jaxserve.executor.executable_cache import ExecutableCache
from jaxserve.executor.mesh import is_elsewhere, make_mesh
from jaxserve.executor.warmup import cache_folder

LOWERED = "what it was lowered to"
X = np.arange(8, dtype=np.float32)


def compile_only_devices() -> list[Any]:
    topology: Any = xla_client.get_topology_for_devices(jax.devices()[:1])
    return list(topology._make_compile_only_devices())[:1]


@pytest.fixture(scope="module")
def program() -> Any:
    return jax.jit(lambda tree: {"y": tree["x"] * 2 + 1}, donate_argnums=0).lower({"x": jnp.asarray(X)}).compile()


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., ExecutableCache]:
    return lambda description="a model": ExecutableCache(tmp_path / "executables", make_mesh(1), description)


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "executables").iterdir())


def test_a_stored_program_computes_the_same_and_compiles_nothing(make: Callable[..., ExecutableCache], program: Any) -> None:
    make().add("decode R=1", LOWERED, program)
    counter = CompileCounter()
    loaded = make().load("decode R=1")
    argument = jax.device_put(X, jax.devices()[0])
    assert loaded is not None
    np.testing.assert_array_equal(loaded({"x": argument})["y"], X * 2 + 1)
    assert counter.count == 0
    assert argument.is_deleted(), "donation survives"


def test_another_name_model_source_or_flag_is_another_entry(
    make: Callable[..., ExecutableCache], program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().add("decode R=1", LOWERED, program)
    assert make().load("decode R=2") is None
    assert make("another model").load("decode R=1") is None
    with monkeypatch.context() as patch:
        patch.setattr(executable_cache, "source_digest", lambda: "edited")
        assert make().load("decode R=1") is None
        assert make().find("decode R=1", "something else") is None
        assert make().find("decode R=1", LOWERED) is not None
        assert make().load("decode R=1") is not None, "and is found without lowering from now on"
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    assert make().load("decode R=1") is None
    assert make().find("decode R=1", LOWERED) is None


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: data[:-9] + b"123456789", lambda data: b"something else"],
    ids=["short", "empty", "changed", "foreign"],
)
def test_a_damaged_entry_is_as_good_as_none(
    make: Callable[..., ExecutableCache],
    program: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    make().add("decode R=1", LOWERED, program)
    for entry in entries(tmp_path):  # one file, two names
        intact = entry.read_bytes()
    entry.write_bytes(damage(intact))
    with caplog.at_level(logging.WARNING):
        assert make().load("decode R=1") is None
    assert "of no use" in caplog.text
    make().add("decode R=1", LOWERED, program)
    assert make().load("decode R=1") is not None


def test_a_folder_that_cannot_be_written_costs_only_a_warning(
    make: Callable[..., ExecutableCache], program: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "executables").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        make().add("decode R=1", LOWERED, program)
    assert "is not cached" in caplog.text


def test_a_full_disk_is_told_once_and_leaves_nothing_behind(
    make: Callable[..., ExecutableCache], program: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        cache = make()
        for name in ("a", "b"):
            assert cache.add(name, LOWERED, program) is program
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "--compilation-cache-dir" in warnings[0], warnings
    assert not entries(tmp_path)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"The folder of compiled programs '.*/file/programs' cannot be made: Not a directory\.$"):
        cache_folder(str(tmp_path / "file" / "programs"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(OSError, match="no home folder for caches; set XDG_CACHE_HOME"):
        cache_folder(None)


def test_the_eldest_entries_go_first(make: Callable[..., ExecutableCache], program: Any, tmp_path: Path) -> None:
    cache = make()
    for age_s, name in ((300, "a"), (200, "b"), (100, "c")):
        cache.add(name, f"{LOWERED} {name}", program)
        entry = next(path for path in entries(tmp_path) if path.name.startswith(f"{name}-"))
        os.utime(entry, (1e9 - age_s, 1e9 - age_s))
    assert cache.load("a") is not None  # and is the newest now
    size = entries(tmp_path)[0].stat().st_size
    cache.prune(max_bytes=2 * size + size // 2)
    assert [path.name[0] for path in entries(tmp_path)] == ["a", "a", "c", "c"]
    cache.prune(max_bytes=10 * size)
    assert len(entries(tmp_path)) == 4


def test_what_is_stored_for_devices_elsewhere_is_loaded_where_they_are(
    make: Callable[..., ExecutableCache], program: Any, tmp_path: Path
) -> None:
    """A CPU that is only compiled for, in place of an accelerator; tests/accelerator compile for it, too."""
    here, elsewhere = make_mesh(1), make_mesh(1, compile_only_devices())
    assert is_elsewhere(elsewhere) and not is_elsewhere(here)
    there = ExecutableCache(tmp_path / "executables", elsewhere, "a model")
    assert there.load("decode R=1") is None
    there.add("decode R=1", LOWERED, program)
    assert there.load("decode R=1") is not None, "that it is there is known without loading it"
    assert there.find("decode R=1", LOWERED) is not None
    loaded = make().load("decode R=1")
    assert loaded is not None
    np.testing.assert_array_equal(loaded({"x": jax.device_put(X, jax.devices()[0])})["y"], X * 2 + 1)


def test_a_program_is_found_for_its_own_devices_alone(tmp_path: Path) -> None:
    """In their order; and it computes there."""
    for devices in (jax.devices()[:4], jax.devices()[4:8], jax.devices()[7:3:-1]):
        mesh = make_mesh(4, devices)
        whole, divided = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in ((), ("tensor",)))
        program = jax.jit(lambda x: jnp.cumsum(x), in_shardings=divided, out_shardings=whole)
        cache = ExecutableCache(tmp_path / "executables", mesh, "a model")
        assert cache.load("decode R=1") is None and cache.find("decode R=1", LOWERED) is None
        cache.add("decode R=1", LOWERED, program.lower(jnp.asarray(X)).compile())
        loaded = ExecutableCache(tmp_path / "executables", mesh, "a model").load("decode R=1")
        assert loaded is not None
        sums = loaded(jax.device_put(X, divided))
        np.testing.assert_array_equal(sums, np.cumsum(X))
        assert sums.devices() == set(devices)
        assert [shard.device for shard in jax.device_put(X, divided).addressable_shards] == list(devices)


@pytest.fixture
def jax_cache_of_others(tmp_path: Path) -> Iterator[None]:
    """JAX's own cache, in use by a program that an engine is in."""
    options = {
        "jax_enable_compilation_cache": True,  # planners, in tests before this one, have switched it off for good
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("jax_cache_of_others")
def test_what_jax_has_read_from_its_own_cache_is_not_added(make: Callable[..., ExecutableCache]) -> None:
    """It would be found again, and fail when it runs."""

    def compilation(cache: ExecutableCache, *, again: bool = False) -> Any:
        if again:
            jax.clear_caches()
        return _Compilation(jax.jit(lambda x: jnp.sort(jnp.sin(x)).sum()).lower(X), "score", "", cache, None).compile()

    compiled, cache = compilation(make()), make("another model")
    assert make().load("score") is not None
    for entry in cache._folder.iterdir():
        entry.unlink()
    read = compilation(cache, again=True)
    assert read(X) == compiled(X)
    assert cache.load("score") is None and list(cache._folder.iterdir()) == []


def test_a_program_for_arguments_of_another_shape_is_another_one(make: Callable[..., ExecutableCache]) -> None:
    """Also where it does not use them: its text is the same."""
    cache, program = make(), jax.jit(lambda tree, x: x + 1)
    for size in (3, 5):
        unused = {"weights": jnp.zeros(size)}
        compiled = _Compilation(program.lower(unused, jnp.asarray(X)), "score", "", cache, None).compile()
        np.testing.assert_array_equal(compiled(unused, jnp.asarray(X)), X + 1)
