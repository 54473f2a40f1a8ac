"""Tuning tables: where they come from, what goes before what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.tpu.tuning import CHIPS, PassConfig
from jaxserve.kernels.tuning import KernelShape

SHAPE = KernelShape(32, 8, 128, 128, 64, "bfloat16")
KIND = "NVIDIA H200"
TPU_DEFAULT = PassConfig(1, 1, 128, 128, 1, False)


def table(path: Path, fields: dict[str, Any], *, kind: str = KIND, op: str = "extend") -> str:
    path.write_text(json.dumps({kind: {SHAPE.key(op): fields}}))
    return str(path)


def test_without_a_table_the_kernels_own_config_is_used() -> None:
    from jaxserve.kernels.pallas.gpu.decode import DecodeConfig
    from jaxserve.kernels.pallas.gpu.extend import ExtendConfig

    assert tuning.decode_config("no such device", SHAPE) == DecodeConfig.for_heads(128)
    assert tuning.extend_config("no such device", SHAPE) == ExtendConfig.for_heads(128)


def test_the_packaged_table_holds_configs_that_load() -> None:
    for kind, shapes in tuning.packaged_table().items():
        for key in shapes:
            assert key.split()[0] in ("decode", "extend"), key
            if kind in CHIPS:
                assert isinstance(tuning.tuned(kind, key, TPU_DEFAULT), PassConfig)
        if kind not in CHIPS:
            tuning.decode_config(kind, SHAPE)
            tuning.extend_config(kind, SHAPE)


def test_a_table_is_for_its_device_shape_and_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, table(tmp_path / "t.json", {"max_heads_per_tile": 4}))
    default = tuning.extend_config("another device", SHAPE)
    assert default.max_heads_per_tile != 4
    tuned = tuning.extend_config(KIND, SHAPE)
    assert tuned.max_heads_per_tile == 4
    assert tuned.block_kv == default.block_kv  # what the table does not name
    assert tuning.extend_config(KIND, KernelShape(32, 8, 128, 128, 16, "bfloat16")) == default
    assert tuning.decode_config(KIND, SHAPE) == tuning.decode_config("another device", SHAPE)


def test_the_users_file_goes_before_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = {KIND: {SHAPE.key("extend"): {"block_kv": 64, "num_stages": 3}}}
    monkeypatch.setattr(tuning, "packaged_table", lambda: packaged)
    assert tuning.extend_config(KIND, SHAPE).num_stages == 3
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, table(tmp_path / "t.json", {"block_kv": 64, "num_stages": 4}))
    assert tuning.extend_config(KIND, SHAPE).num_stages == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"no_such": 1}, "there is no 'no_such'"), ({"num_stages": "2"}, "num_stages must be of type int; got '2'")],
)
def test_a_config_that_is_none_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "t.json", fields)
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, path)
    with pytest.raises(ValueError, match=message) as error:
        tuning.extend_config(KIND, SHAPE)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("op", "fields", "message"),
    [
        ("extend", {"consumers": 3}, "consumers must be 1 or 2, not 3"),
        ("extend", {"block_kv": 96}, "block_kv must be 64, 128 or 256, not 96"),
        ("extend", {"num_stages": 1}, "num_stages must be at least 2"),
        ("extend", {"max_heads_per_tile": 6}, "max_heads_per_tile must be 1, 2, 4, 8 or 16, not 6"),
        ("extend", {"consumer_registers": 240, "producer_registers": 40}, "add up to 520 a thread of each warpgroup"),
        ("extend", {"num_stages": 9}, "bytes of shared memory"),
        ("decode", {"streams": 3}, "streams must be 1 or 2, not 3"),
        ("decode", {"stages": 1}, "stages must be at least 2, not 1"),
        ("decode", {"block_kv": 48}, "block_kv must be 32, 64, 128 or 256, not 48"),
        ("decode", {"out_columns": 48}, "out_columns must be 0 or a multiple of 32 that divides 128, not 48"),
        ("decode", {"streams": 2, "producer_registers": 100}, "producer_registers must be a multiple of 8 from 24 to 256"),
        ("decode", {"streams": 1, "stages": 9}, "bytes of shared memory"),
    ],
    ids=str,
)
def test_a_config_that_no_gpu_kernel_can_run_with_is_refused(
    op: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "t.json", fields, op=op)
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, path)
    make = tuning.decode_config if op == "decode" else tuning.extend_config
    with pytest.raises(ValueError, match=message) as error:
        make(KIND, SHAPE)
    assert path in str(error.value)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_the_defaults_can_be_run_with(dims: tuple[int, int], is_quantized: bool) -> None:
    from jaxserve.kernels.pallas.gpu.decode import DecodeConfig
    from jaxserve.kernels.pallas.gpu.extend import ExtendConfig

    assert DecodeConfig.for_heads(*dims, is_quantized=is_quantized).problem(*dims, is_quantized) is None
    assert ExtendConfig.for_heads(dims[0], is_quantized=is_quantized).problem(*dims, is_quantized) is None


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "must hold an object"), ('{"a": {"b": 1}}', "must hold an object")]
)
def test_a_file_that_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        tuning.load_table(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        tuning.load_table("nowhere.json")
