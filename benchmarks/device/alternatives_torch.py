"""What a torch program would run for the same shapes: SDPA on dense KV, FlexAttention on pages, FlashInfer where installed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.device.alternatives_jax import is_plain
from benchmarks.device.case import Case, Measure, NotHereError, Setting
from benchmarks.device.decode import decode_shapes
from benchmarks.device.extend import extend_shapes
from benchmarks.device.torch_timing import time_torch, torch_cuda
from jaxserve.bench.inputs import AttentionCase
from jaxserve.bench.timing import copies_needed

# FlexAttention's tiles are of 128 keys; a page must be one. Compiling one takes many seconds, so only these cases.
FLEX_PAGE = 128
FLEX_CASES = ("decode 64 x 4096", "extend 4096", "decode 4 x 4096", "extend 16384", "decode 64 x 16384, window 4096")
# ||flex - SDPA|| / ||SDPA||: a comparison with something that computes something else would be worth nothing.
MOST_ERROR = 2e-2


def _result(name: str, times: dict[str, Any], case: AttentionCase, **more: Any) -> dict[str, Any]:
    return {"against": name, **times, "bytes": case.nbytes, "flop": case.flop, **more}


def sdpa(backend: str, name: str, case: AttentionCase, setting: Setting) -> Measure:
    """Dense KV [R, Hkv, kv_len, D]."""
    torch = torch_cuda(setting)
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, copies = dense_inputs(torch, case, "cuda")
    which = getattr(SDPBackend, backend)

    def run(k: Any, v: Any) -> Any:
        with sdpa_kernel(which):
            return dense_attention(torch, q, k, v, case)

    return lambda: _result(name, time_torch([functools.partial(run, k, v) for k, v in copies]), case)


def dense_inputs(torch: Any, case: AttentionCase, device: str) -> tuple[Any, list[tuple[Any, Any]]]:
    q_len, kv_len = case.rows[0]

    def draw(heads: int, tokens: int) -> Any:
        shape = (case.num_rows, heads, tokens, case.head_dim)
        return torch.randn(shape, dtype=getattr(torch, case.dtype), device=device)

    copies = copies_needed(case.kv_bytes) if device == "cuda" else 2
    pairs = [(draw(case.num_kv_heads, kv_len), draw(case.num_kv_heads, kv_len)) for _ in range(copies)]
    return draw(case.num_heads, q_len), pairs


def dense_attention(torch: Any, q: Any, k: Any, v: Any, case: AttentionCase) -> Any:
    q_len, kv_len = case.rows[0]
    options: dict[str, Any] = {"scale": case.scale, "enable_gqa": case.num_heads != case.num_kv_heads}
    if 1 < q_len < kv_len:
        from torch.nn.attention.bias import causal_lower_right

        options["attn_mask"] = causal_lower_right(q_len, kv_len)
    else:
        options["is_causal"] = q_len > 1
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


def flex(name: str, case: AttentionCase, setting: Setting) -> Measure:
    torch = torch_cuda(setting)
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.inference_mode():
        calls, error = flex_calls(torch, compiled, case, "cuda")
    if case.sliding_window is None and not error <= MOST_ERROR:
        raise FloatingPointError(f"its result differs from SDPA's: {error:.2e}")
    return lambda: _result(name, time_torch(calls), case, error=error)


def flex_calls(torch: Any, attention: Any, case: AttentionCase, device: str) -> tuple[Sequence[Callable[[], Any]], float]:
    """One call per copy of the pages, and how far the first one's result is from SDPA's on the same keys, gathered."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    q_len, kv_len = case.rows[0]
    pages_per_row = -(-kv_len // FLEX_PAGE)
    num_pages = case.num_rows * pages_per_row
    paged = PagedAttention(num_pages, FLEX_PAGE, case.num_rows, device=device)
    random.Random(0).shuffle(paged.empty_pages)
    for row in range(case.num_rows):
        paged.reserve(torch.tensor(row, device=device), torch.tensor(kv_len, device=device))
    mask = paged.convert_logical_block_mask(_flex_mask(case, device))
    q = torch.randn(case.num_rows, case.num_heads, q_len, case.head_dim, dtype=getattr(torch, case.dtype), device=device)
    shape = (1, case.num_kv_heads, num_pages * FLEX_PAGE, case.head_dim)
    copies = copies_needed(case.kv_bytes) if device == "cuda" else 2
    pools = [tuple(torch.randn(shape, dtype=q.dtype, device=device) for _ in range(2)) for _ in range(copies)]
    options = {"block_mask": mask, "scale": case.scale, "enable_gqa": case.num_heads != case.num_kv_heads}
    calls = [functools.partial(attention, q, k, v, **options) for k, v in pools]
    table = paged.page_table[:, :pages_per_row]
    k, v = (_gather(torch, pool, table, kv_len) for pool in pools[0])
    got, want = (x.float() for x in (calls[0](), dense_attention(torch, q, k, v, case)))
    return calls, float((got - want).norm() / want.norm())


def _flex_mask(case: AttentionCase, device: str) -> Any:
    """Block mask over logical positions: causal, with the window."""
    from torch.nn.attention.flex_attention import create_block_mask

    q_len, kv_len = case.rows[0]
    start, window = kv_len - q_len, case.sliding_window or kv_len

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query + start) & (key > query + start - window)

    rows = case.num_rows
    return create_block_mask(sees, rows, 1, q_len, kv_len, device=device, BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE))


def _gather(torch: Any, pool: Any, table: Any, kv_len: int) -> Any:
    """[1, Hkv, tokens, D] by pages int64 [R, n] -> [R, Hkv, kv_len, D]."""
    pages = pool[0].unflatten(1, (-1, FLEX_PAGE))  # [Hkv, P, page, D]
    rows = pages[:, table].flatten(2, 3)  # [Hkv, R, n * page, D]
    return rows[:, :, :kv_len].transpose(0, 1).contiguous()


def flashinfer(name: str, case: AttentionCase, setting: Setting) -> Measure:
    torch = torch_cuda(setting)
    try:
        import flashinfer as fi
    except ImportError as error:
        raise NotHereError("flashinfer is not installed") from error

    q_len, kv_len = case.rows[0]
    pages_per_row = -(-kv_len // case.page_size)
    num_pages = case.num_rows * pages_per_row

    def counts(step: int) -> Any:
        return torch.arange(case.num_rows + 1, dtype=torch.int32, device="cuda") * step

    last = torch.full((case.num_rows,), (kv_len - 1) % case.page_size + 1, dtype=torch.int32, device="cuda")
    order = torch.randperm(num_pages, device="cuda").to(torch.int32)
    heads = (case.num_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtype = getattr(torch, case.dtype)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    kinds = {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": case.scale}
    if q_len == 1:
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(counts(pages_per_row), order, last, *heads, **kinds)
    else:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(counts(q_len), counts(pages_per_row), order, last, *heads, causal=True, **kinds)
    q = torch.randn(case.num_tokens, case.num_heads, case.head_dim, dtype=dtype, device="cuda")
    shape = (num_pages, case.num_kv_heads, case.page_size, case.head_dim)
    pools = [
        tuple(torch.randn(shape, dtype=dtype, device="cuda") for _ in range(2)) for _ in range(copies_needed(case.kv_bytes))
    ]
    wrapper.run(q, pools[0])  # which compiles it
    return lambda: _result(name, time_torch([functools.partial(wrapper.run, q, pool) for pool in pools]), case)


def cases(setting: Setting) -> list[Case]:
    """By what is likely to be asked first: a short budget leaves out the end."""
    shapes = {**extend_shapes(setting), **decode_shapes(setting)}
    uniform = {name: case for name, case in shapes.items() if len(set(case.rows)) == 1 and not case.is_quantized}
    plain = {name: case for name, case in uniform.items() if is_plain(case) and not 1 < case.rows[0][0] < 5}
    dense = [
        Case(f"{name}: SDPA {label}", functools.partial(sdpa, backend, name, case, setting))
        for name, case in plain.items()
        if case.page_size == 64 or setting.smoke
        for label, backend in (("flash", "FLASH_ATTENTION"), ("cuDNN", "CUDNN_ATTENTION"))
    ]
    paged = [
        Case(f"{name}: FlexAttention paged", functools.partial(flex, name, uniform[name], setting))
        for name in FLEX_CASES
        if name in uniform
    ]
    infer = [Case(f"{name}: FlashInfer", functools.partial(flashinfer, name, case, setting)) for name, case in plain.items()]
    num_extend = sum(case.name.startswith("extend") for case in dense)
    return [*dense[: num_extend + 2], *paged[:2], *dense[num_extend + 2 :], *paged[2:], *infer]
