"""Tuning tables: where they come from, what goes before what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.tpu_tuning import CHIPS, PassConfig
from jaxserve.kernels.tuning import KernelShape

SHAPE = KernelShape(32, 8, 128, 128, 64, "bfloat16")
KIND = "NVIDIA H200"
TPU_DEFAULT = PassConfig(1, 1, 128, 128, 1, False)


def table(path: Path, fields: dict[str, Any], *, kind: str = KIND, op: str = "extend") -> str:
    path.write_text(json.dumps({kind: {SHAPE.key(op): fields}}))
    return str(path)


def test_without_a_table_the_kernels_own_config_is_used() -> None:
    from jaxserve.kernels.pallas.gpu_decode import DecodeConfig
    from jaxserve.kernels.pallas.gpu_extend import ExtendConfig

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
    packaged = {KIND: {SHAPE.key("extend"): {"num_stages": 3}}}
    monkeypatch.setattr(tuning, "packaged_table", lambda: packaged)
    assert tuning.extend_config(KIND, SHAPE).num_stages == 3
    monkeypatch.setenv(tuning.TUNING_FILE_VARIABLE, table(tmp_path / "t.json", {"num_stages": 4}))
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
