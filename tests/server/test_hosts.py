"""What hosts tell each other of themselves, and the secret that they share."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import ServerArgs
from jaxserve.server import hosts
from jaxserve.server.worker_process import UserError

SECRET = "sixteen characters"


def args(address: str = "10.0.0.1:5000", **options: Any) -> ServerArgs:
    return ServerArgs(**({"model_path": "m", "nnodes": 2, "tp_size": 4, "dist_init_addr": address} | options))


def test_a_hello_has_what_must_be_the_same_and_no_secrets() -> None:
    options = {field.name for field in dataclasses.fields(ServerArgs)}
    assert options >= hosts._OWN_OPTIONS
    one = hosts._hello(args(api_key="k", decode_row_buckets=(1, 2)))
    assert set(one.options) == options - hosts._OWN_OPTIONS
    assert one.options["decode_row_buckets"] == [1, 2], "as it is read from the other side"
    assert not any("key" in name or "secret" in name for name in one.options)
    other = hosts._hello(args(api_key="k2", model_path="elsewhere", log_level="debug", decode_row_buckets=(1, 2), node_rank=1))
    assert (other.options, other.software) == (one.options, one.software)


def test_the_secret_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    assert hosts._secret(args(dist_secret_file=str(file)), {}) == SECRET.encode()
    assert hosts._secret(args(), {"JAXSERVE_DIST_SECRET": SECRET}) == SECRET.encode()


@pytest.mark.parametrize("address", ["127.0.0.1:5000", "127.1.2.3:5000", "[::1]:5000", "localhost:5000"])
def test_on_one_machine_there_may_be_none(address: str) -> None:
    assert hosts._secret(args(address), {}) == b""
    with pytest.raises(UserError, match="has 3 characters; it takes 16 or more"):
        hosts._secret(args(address), {"JAXSERVE_DIST_SECRET": "abc"})


@pytest.mark.parametrize(
    "address", ["10.0.0.1:5000", "0.0.0.0:5000", "localhost.example.com:5000", "[fd00::1]:5000", "127.example:1"]
)
def test_elsewhere_it_takes_one(address: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="has 0 characters; it takes 16 or more, in --dist-secret-file or the environment's JAX"
    ):
        hosts._secret(args(address), {})


def test_bad_sources_of_the_secret(tmp_path: Path) -> None:
    missing = args(dist_secret_file=str(tmp_path / "none"))
    with pytest.raises(UserError, match="each give a secret; only one of them may"):
        hosts._secret(missing, {"JAXSERVE_DIST_SECRET": SECRET})
    with pytest.raises(UserError, match="none' cannot be read: No such file or directory"):
        hosts._secret(missing, {})
