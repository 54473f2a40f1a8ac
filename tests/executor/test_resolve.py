"""What "auto" becomes, and how the KV pool is sized."""

from __future__ import annotations

import pytest

from jaxserve.config import ServerArgs
from jaxserve.executor.resolve import resolve_args

GIB = 2**30


def resolved(platform: str = "cpu", **options: object) -> ServerArgs:
    args = ServerArgs(model_path="m", **options)  # type: ignore[arg-type]
    return resolve_args(args, platform=platform, model_context_len=4096, page_size=args.page_size or 16)


def test_defaults_follow_the_platform() -> None:
    cpu, gpu, tpu = resolved("cpu"), resolved("gpu"), resolved("tpu")
    assert (cpu.dtype, cpu.max_running_requests, cpu.chunked_prefill_size) == ("float32", 64, 1024)
    assert (gpu.dtype, gpu.max_running_requests, gpu.chunked_prefill_size) == ("bfloat16", 256, 8192)
    assert cpu.page_size == gpu.page_size == 16
    assert cpu.prefill_token_buckets == (16, 64, 256, 1024)
    assert cpu.decode_row_buckets == (1, 2, 4, 8, 16, 32, 64)
    assert tpu.decode_row_buckets == (1, 2, 4, 8, 16, 32, 64, 128, 256)
    assert gpu.decode_row_buckets == tpu.decode_row_buckets[3:]  # XLA pads a GPU's products to 8 rows
    assert resolved("gpu", max_running_requests=3).decode_row_buckets == (3,)


def test_chunks_end_on_pages_and_buckets_reach_the_largest_step() -> None:
    args = resolved(chunked_prefill_size=100, page_size=16, max_running_requests=5)
    assert args.chunked_prefill_size == 96
    assert args.prefill_token_buckets == (16, 64, 96)
    assert args.decode_row_buckets == (1, 2, 4, 5)
    assert resolved(chunked_prefill_size=3, page_size=16).chunked_prefill_size == 16


def test_without_chunks_a_whole_context_fits_one_step() -> None:
    assert resolved(chunked_prefill_size=-1, max_prefill_tokens=100).prefill_token_buckets[-1] == 4096


def test_a_mixed_step_has_room_for_all_decode_rows_and_a_page() -> None:
    args = resolved(enable_mixed_chunk=True, chunked_prefill_size=16, max_running_requests=64)
    assert args.prefill_token_buckets[-1] == 64 + 16


def test_given_buckets_are_cut_and_completed() -> None:
    args = resolved(prefill_token_buckets=(8, 5000), decode_row_buckets=(2,), max_running_requests=3)
    assert args.prefill_token_buckets == (8, 1024)
    assert args.decode_row_buckets == (2, 3)


def test_steps_of_deterministic_inference_have_one_size() -> None:
    for platform, size in (("cpu", 64), ("gpu", 256), ("tpu", 256)):
        args = resolved(platform, enable_deterministic_inference=True)
        assert args.prefill_token_buckets == args.decode_row_buckets == (size,)
        assert args.max_running_requests == args.chunked_prefill_size == size
        again = resolve_args(args, platform=platform, model_context_len=4096, page_size=16)
        assert again == args
    small = {"chunked_prefill_size": 32, "max_running_requests": 3}
    args = resolved(enable_deterministic_inference=True, **small)
    assert (args.prefill_token_buckets, args.chunked_prefill_size, args.max_running_requests) == ((64,), 32, 3)
    assert resolved(enable_deterministic_inference=True, enable_mixed_chunk=True).max_running_requests == 48


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--context-length must be at most the model's 4096; got 5000"):
        resolved(context_length=5000)
