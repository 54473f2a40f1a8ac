"""What XLA is told, and that XLA_FLAGS has the last word."""

from __future__ import annotations

import pytest

from jaxserve.executor.compiler_options import compiler_options


def test_only_gpus_are_told_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert compiler_options("cpu") is compiler_options("tpu") is None
    told = compiler_options("gpu")
    assert told is not None and "WHILE" in str(told["xla_gpu_enable_command_buffer"])


def test_what_the_user_sets_is_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0")
    told = compiler_options("gpu")
    assert told is not None and "xla_gpu_enable_command_buffer" not in told
    assert told["xla_gpu_enable_triton_gemm"] is False


def test_deterministic_programs_time_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    told = compiler_options("gpu", deterministic=True)
    assert told is not None and told["xla_gpu_exclude_nondeterministic_ops"] and told["xla_gpu_autotune_level"] == "0"
    assert compiler_options("cpu", deterministic=True) is None


def test_int8_weights_are_not_left_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    plain, quantized = compiler_options("gpu"), compiler_options("gpu", quantized=True)
    assert plain is not None and quantized is not None
    assert plain.keys() - quantized.keys() == {"xla_gpu_enable_triton_gemm"}
    assert compiler_options("tpu", quantized=True) is None
