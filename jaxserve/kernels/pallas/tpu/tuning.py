"""Block sizes of the TPU kernels: what can run, what a cost model thinks of it, and a table that knows better where one exists.

Nothing here has been timed on a TPU. The model counts bytes, products and vector operations per loop step; what these take was
read from the schedules that libtpu makes (`python -m benchmarks.tpu_schedule`), fixed costs are guesses (marked). It serves to
choose among sizes that fit, not to predict times. What is measured on a TPU goes to the tables of jaxserve.kernels.tuning,
which name fields of PassConfig.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxserve.kernels import tuning
from jaxserve.kernels.pallas.tpu.layout import LANES, SUBLANES, RowLayout, align
from jaxserve.kernels.spec import QUANTIZED_DTYPES, AttentionSpec

PRODUCT_ROWS = 512  # a query tile with more is multiplied part by part, so that one's products hide another's softmax
_WRITE_BYTES = 1 << 20  # of a group of tokens that is written at once, as float32


@dataclasses.dataclass(frozen=True)
class TpuChip:
    """One JAX device: a chip of v5e or v6e, one of a TPU7x's two cores. (A v5p device is two cores; the kernels use one.)"""

    vmem_bytes: int
    smem_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    mxu_size: int
    # 4 vector units of 8 x 128 lanes at the clock that the matrix units' peak implies.
    vector_ops_per_s: float


CHIPS = {
    "TPU v5 lite": TpuChip(128 << 20, 1 << 20, 0.82e12, 197e12, 128, 6.2e12),
    "TPU v5": TpuChip(64 << 20, 1 << 20, 1.38e12, 229e12, 128, 7.2e12),
    "TPU v6 lite": TpuChip(128 << 20, 1 << 20, 1.64e12, 918e12, 256, 7.2e12),
    "TPU7x": TpuChip(64 << 20, 1 << 20, 3.69e12, 1153e12, 256, 9.0e12),
}


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """Of one of the two passes, decode and extend."""

    block_tokens: int  # query tokens per step of the grid; their results are kept in VMEM while keys pass by
    tile_tokens: int  # query tokens per product; 1 for decode. Divides block_tokens
    kv_block_tokens: int  # keys copied to VMEM at a time. Whole pages
    kv_chunk_tokens: int  # keys per product. Divides kv_block_tokens, or is as large
    head_unroll: int  # KV heads side by side in the code, so that one's products hide another's softmax. Divides their number
    split_masked: bool  # have a second copy of the code for tiles that need no mask
    num_buffers: int = 2  # KV blocks in VMEM: one is worked on while the others come


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    decode: PassConfig
    extend: PassConfig
    decode_queries: int  # of mixed steps: a row with so many or fewer is a decode row there
    min_write_group: int  # tokens that are written at once, at least: a tile of memory
    max_write_group: int  # and at most, however long a prompt is: a few buffers of them are in VMEM
    vmem_limit_bytes: int | None  # what a kernel may take; the compiler's own limit is a fraction of what there is

    def decode_of(self, queries: int) -> PassConfig:
        """Of so many queries per row. With more than in mixed steps a block has fewer rows, so that it takes as much VMEM."""
        rows = max(1, self.decode.block_tokens * min(self.decode_queries, queries) // queries)
        return _with_queries(dataclasses.replace(self.decode, block_tokens=rows), queries)


def _with_queries(config: PassConfig, queries: int) -> PassConfig:
    """A decode pass whose tiles have so many tokens, all of one row."""
    return dataclasses.replace(config, tile_tokens=queries, block_tokens=queries * config.block_tokens)


@dataclasses.dataclass(frozen=True)
class ExpandedConfig:
    """Of latent attention over expanded keys and values, in which each head has its own."""

    extend: PassConfig
    heads_at_once: int  # the heads of a page; divides the number of heads
    vmem_limit_bytes: int


@dataclasses.dataclass(frozen=True)
class PassShape:
    """What a pass works on, on one shard."""

    layout: RowLayout
    num_heads: int
    num_kv_heads: int
    page_size: int
    dtype: str
    kv_dtype: str
    is_decode: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        return int(jnp.dtype(self.kv_dtype).itemsize)

    @property
    def key(self) -> str:
        """In a tuned table."""
        dims = (self.layout.key_dim, self.layout.value_dim)
        shape = tuning.KernelShape(self.num_heads, self.num_kv_heads, *dims, self.page_size, self.kv_dtype)
        return shape.key("decode" if self.is_decode else "extend")


def unsupported(spec: AttentionSpec) -> str | None:
    """The reason why the kernels can't do `spec`, or None."""
    if spec.chip.platform != "tpu":
        return f"it runs on TPUs, not on platform {spec.chip.platform!r}."
    if spec.chip.kind not in CHIPS:
        return f"device kind must be one of {', '.join(CHIPS)}; got {spec.chip.kind!r}."
    if spec.latent_dim is not None and not spec.is_causal:
        return "attention over latents is causal."
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads are not a multiple of {spec.num_kv_heads} KV heads."
    if spec.dtype not in ("bfloat16", "float32"):
        return f"dtype must be bfloat16 or float32; got {spec.dtype}."
    if spec.kv_dtype not in (spec.dtype, *QUANTIZED_DTYPES):
        return f"kv_dtype must be {spec.dtype}, float8_e4m3fn or int8; got {spec.kv_dtype}."
    if spec.latent_dim is None and spec.head_dim > 256:
        return f"head_dim must be at most 256; got {spec.head_dim}."
    page_size = spec.page_size or 128
    if reason := unsupported_page(page_size, spec.kv_dtype):
        return reason
    try:
        # Not of a tuned table: one that is wrong should be heard of, and not lead to another backend.
        for shape in pass_shapes(dataclasses.replace(spec, page_size=page_size)):
            _cheapest(shape, CHIPS[spec.chip.kind])
    except ValueError as error:
        return str(error)
    return None


def unsupported_page(page_size: int, kv_dtype: str) -> str | None:
    tile = memory_tile_tokens(kv_dtype)
    if page_size % tile or page_size > 256 or page_size & (page_size - 1):
        return f"page_size must be a power of two of {tile}..256 tokens for {kv_dtype}; got {page_size}."
    if kv_dtype in QUANTIZED_DTYPES and page_size % LANES:
        # A page's scales lie in lanes; pages of less than 128 would leave most of each copied tile empty.
        return f"page_size must be 128 or 256 for {kv_dtype} with a scale per token; got {page_size}."
    return None


def memory_tile_tokens(dtype: str) -> int:
    """Tokens in a tile of HBM: 8 rows of 32 bits, as many tokens in each as fit. (v5e and v6e could do with 8 for bfloat16.)"""
    return 32 // jnp.dtype(dtype).itemsize


def layout_of(spec: AttentionSpec) -> RowLayout:
    if spec.latent_dim is None:
        return RowLayout.of(spec.head_dim)
    return RowLayout.latent(spec.latent_dim, spec.head_dim - spec.latent_dim)


def choose_config(spec: AttentionSpec) -> TpuConfig:
    """By the cost model and the tables of kernels.tuning. ValueError if nothing fits, or for a wrong table."""
    return config_of(*pass_shapes(spec), spec.chip.kind)


def pass_shapes(spec: AttentionSpec) -> tuple[PassShape, PassShape]:
    """Of decode and of extend."""
    assert spec.page_size is not None
    layout = layout_of(spec)
    heads = (spec.absorbed_heads, spec.num_kv_heads)
    decode = PassShape(layout, *heads, spec.page_size, spec.dtype, spec.kv_dtype, is_decode=True)
    return decode, dataclasses.replace(decode, is_decode=False)


def config_of(decode: PassShape, extend: PassShape, device_kind: str) -> TpuConfig:
    return with_limits(decode, extend, pass_config(decode, device_kind), pass_config(extend, device_kind), device_kind)


def pass_config(shape: PassShape, device_kind: str) -> PassConfig:
    default = _cheapest(shape, CHIPS[device_kind])
    return tuning.tuned(device_kind, shape.key, default, lambda config: problem_of(shape, config))


def with_limits(
    decode: PassShape, extend: PassShape, decode_config: PassConfig, extend_config: PassConfig, device_kind: str
) -> TpuConfig:
    """What both passes share, beside their configs."""
    chip = CHIPS[device_kind]
    queries = _decode_queries(decode, decode_config, chip)
    mixed_decode_bytes = vmem_bytes(decode, _with_queries(decode_config, queries))
    limit = _vmem_limit(max(vmem_bytes(decode, decode_config), mixed_decode_bytes, vmem_bytes(extend, extend_config)), chip)
    smallest = memory_tile_tokens(decode.kv_dtype)
    largest = max(smallest, _WRITE_BYTES // (4 * decode.num_kv_heads * decode.layout.width))
    return TpuConfig(decode_config, extend_config, queries, smallest, largest, limit)


def _vmem_limit(needed_bytes: int, chip: TpuChip) -> int:
    """The model leaves out what the compiler spills and pads."""
    return min(max(2 * needed_bytes, 32 << 20), chip.vmem_bytes * 15 // 16)


def expanded_config(num_heads: int, layout: RowLayout, page_size: int, dtype: str, device_kind: str) -> ExpandedConfig:
    """Of an extend pass with as many KV heads as query heads, which are those of one shard. A page of all of them may be too
    much for VMEM; the pool then has groups of heads (extend_attention). ValueError if not even one head's page fits."""
    chip = CHIPS[device_kind]
    shapes = [
        PassShape(layout, heads, heads, page_size, dtype, dtype, is_decode=False)
        for heads in range(num_heads, 0, -1)
        if num_heads % heads == 0
    ]
    fitting = [shape for shape in shapes if _fitting(shape, chip)] or shapes[-1:]

    def seconds(shape: PassShape) -> float:
        return num_heads // shape.num_heads * predicted_seconds(shape, _cheapest(shape, chip), chip)

    shape = min(fitting, key=seconds)
    config = pass_config(shape, device_kind)
    return ExpandedConfig(config, shape.num_heads, _vmem_limit(vmem_bytes(shape, config), chip))


def _decode_queries(shape: PassShape, config: PassConfig, chip: TpuChip) -> int:
    """As many as a row with one query hardly notices: a speculated row's few queries then read its keys once, as one does."""

    def fits(queries: int) -> bool:
        wider = _with_queries(config, queries)
        seconds, alone = (predicted_seconds(shape, c, chip) for c in (wider, config))
        return seconds <= 1.05 * alone and 2 * vmem_bytes(shape, wider) <= chip.vmem_bytes

    return next((queries for queries in (4, 2) if fits(queries)), 1)


def problem_of(shape: PassShape, config: PassConfig) -> str | None:
    """Why the kernel can't run with a config that the cost model did not make, or None. Whether it fits is not asked."""
    sizes = {name: value for name, value in dataclasses.asdict(config).items() if not isinstance(value, bool)}
    for name, value in sizes.items():
        if value < 1:
            return f"{name} must be at least 1; got {value}."
    if config.num_buffers < 2:
        return f"num_buffers must be at least 2; got {config.num_buffers}."
    if shape.is_decode and config.tile_tokens != 1:
        return f"tile_tokens must be 1 for decode; got {config.tile_tokens}."
    if config.block_tokens % config.tile_tokens:
        return f"block_tokens {config.block_tokens} must be a multiple of tile_tokens {config.tile_tokens}."
    if config.kv_chunk_tokens % max(shape.page_size, LANES):
        unit = f"{LANES} and of pages of {shape.page_size}"
        return f"kv_chunk_tokens must be a multiple of {unit} tokens; got {config.kv_chunk_tokens}."
    if config.kv_block_tokens % config.kv_chunk_tokens:
        return f"kv_block_tokens {config.kv_block_tokens} must be a multiple of kv_chunk_tokens {config.kv_chunk_tokens}."
    if shape.num_kv_heads % config.head_unroll:
        return f"head_unroll must divide the {shape.num_kv_heads} KV heads; got {config.head_unroll}."
    return None


def _cheapest(shape: PassShape, chip: TpuChip) -> PassConfig:
    fitting = _fitting(shape, chip)
    if not fitting:
        raise ValueError(f"{shape.key}: no block size fits {chip.vmem_bytes >> 20} MiB of VMEM; smaller pages would.")
    return min(fitting, key=lambda c: (predicted_seconds(shape, c, chip), vmem_bytes(shape, c)))


def _fitting(shape: PassShape, chip: TpuChip) -> list[PassConfig]:
    return [config for config in candidates(shape) if 2 * vmem_bytes(shape, config) <= chip.vmem_bytes]


def candidates(shape: PassShape) -> Iterator[PassConfig]:
    """Sizes worth considering, in an order that breaks ties.

    The model would always take the largest, for it knows neither the compiler's time nor its spills. So what stands side by
    side has no more rows than four products with PRODUCT_ROWS, and a buffer 4 MiB: its copy takes longer than a copy's latency.
    """
    unrolls = [n for n in (1, 2, 4, 8) if shape.num_kv_heads % n == 0]
    chunks = (128, 256, 512, 1024) if shape.is_decode else (128, 256, 512)
    for kv_block, kv_chunk in itertools.product((128, 256, 512, 1024, 2048), chunks):
        kv_block = max(kv_block, shape.page_size)
        buffer = kv_block * shape.num_kv_heads * shape.layout.width * shape.kv_bytes
        if (
            (buffer > 4 << 20 and kv_block > max(128, shape.page_size))
            or kv_block % kv_chunk
            or kv_chunk % min(shape.page_size, kv_chunk)
            or kv_chunk < shape.page_size
        ):
            continue
        if shape.is_decode:
            # Rows per step of the grid: only VMEM speaks against more.
            for rows, num_buffers in itertools.product((16, 8, 4, 2, 1), (2, 4, 8)):
                yield PassConfig(rows, 1, kv_block, kv_chunk, unrolls[-1], False, num_buffers)
        else:
            for tile_tokens, tiles in itertools.product((1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2)):
                rows = tile_tokens * shape.group
                if rows % SUBLANES == 0 and (rows <= 4 * PRODUCT_ROWS or tile_tokens == 1):
                    unroll = max(n for n in unrolls if n == 1 or n * rows <= 4 * PRODUCT_ROWS)
                    yield PassConfig(tile_tokens * tiles, tile_tokens, kv_block, kv_chunk, unroll, True)


def neighbours(shape: PassShape, config: PassConfig, device_kind: str) -> Iterator[PassConfig]:
    """What to try beside `config`: one or two of its sizes halved or doubled, or `split_masked` the other way.

    Only what the kernel can run, and what leaves the compiler as much VMEM as `choose_config` does.
    """
    names = ("head_unroll" if shape.is_decode else "tile_tokens", "block_tokens", "kv_block_tokens", "kv_chunk_tokens")
    seen = {config}
    for powers in itertools.product((0, -1, 1), repeat=len(names)):
        if sum(map(abs, powers)) > 2:
            continue
        sizes: Any = {name: int(getattr(config, name) * 2.0**power) for name, power in zip(names, powers, strict=True)}
        other = dataclasses.replace(config, **sizes)
        fits = problem_of(shape, other) is None and 2 * vmem_bytes(shape, other) <= CHIPS[device_kind].vmem_bytes
        if fits and other not in seen:
            seen.add(other)
            yield other
    yield dataclasses.replace(config, split_masked=not config.split_masked)


def _tile_rows(shape: PassShape, config: PassConfig) -> int:
    return align(config.tile_tokens * shape.group, SUBLANES)


def vmem_bytes(shape: PassShape, config: PassConfig) -> int:
    """What the kernel's buffers take, and the scores that are alive at a time."""
    layout, Hkv = shape.layout, shape.num_kv_heads
    rows = _tile_rows(shape, config)
    block_rows = Hkv * rows * (config.block_tokens // config.tile_tokens)
    kv = Hkv * config.kv_block_tokens * layout.width * shape.kv_bytes
    if shape.kv_dtype in QUANTIZED_DTYPES:
        kv += 2 * Hkv * config.kv_block_tokens * 4
    in_and_out = 2 * block_rows * (layout.key_lanes + layout.value_lanes) * jnp.dtype(shape.dtype).itemsize
    running = block_rows * (layout.value_lanes + 2 * LANES) * 4
    scores = 3 * 2 * min(rows, PRODUCT_ROWS) * config.kv_chunk_tokens * 4  # of a product and the next one
    return int(config.num_buffers * kv + in_and_out + running + scores)


# As scheduled: vector operations per score (mask, maximum, subtraction, exponential, sum, conversion, and what waits for a
# matrix unit's results), per element that is converted to bfloat16; what a product costs beside that, and the latency of its
# chain, which the products beside it hide.
_VECTOR_OPS_PER_SCORE = 7.5
_CONVERT_OPS = 0.5
_PRODUCT_S, _CHAIN_S = 0.016e-6, 0.12e-6
# Guesses: starting a page's copy; a loop's turn and its semaphore; a step of the grid.
_COPY_S, _KV_BLOCK_S, _GRID_S = 0.05e-6, 0.3e-6, 0.4e-6
_LATENCY_S = 1e-6  # another guess: from a copy's start to its first byte
# The steps that are compared: 32 rows with 2048 tokens each, or a prompt of 4096.
_DECODE_ROWS, TYPICAL_CONTEXT, _PROMPT = 32, 2048, 4096
_SHORT_CONTEXT = 256  # rows that as many buffers shall serve without waiting for a copy's latency


def predicted_seconds(shape: PassShape, config: PassConfig, chip: TpuChip) -> float:
    """Of one layer of a typical step."""
    token_bytes = shape.num_kv_heads * shape.layout.width * shape.kv_bytes
    if shape.is_decode:
        num_items, seen_keys, pairs_per_item = _DECODE_ROWS, float(TYPICAL_CONTEXT), 1.0
        mean_context, grid_steps = seen_keys, _DECODE_ROWS * config.tile_tokens / config.block_tokens
    else:
        num_items = grid_steps = max(1, _PROMPT // config.block_tokens)
        mean_context, seen_keys = (_PROMPT + config.block_tokens) / 2, (_PROMPT + config.tile_tokens) / 2
        pairs_per_item = config.block_tokens / config.tile_tokens
    # Half a page and half a chunk are wasted at the end of each context.
    copies = mean_context + (0 if shape.is_decode else shape.page_size / 2)
    chunks = (seen_keys + config.kv_chunk_tokens / 2) / config.kv_chunk_tokens
    memory_s = num_items * copies * token_bytes / chip.hbm_bytes_per_s
    compute_s = num_items * pairs_per_item * chunks * _chunk_seconds(shape, config, chip)
    kv_blocks = num_items * (mean_context / config.kv_block_tokens + 0.5)
    fixed_s = kv_blocks * _KV_BLOCK_S + num_items * copies / shape.page_size * _COPY_S + grid_steps * _GRID_S
    first_block_s = config.kv_block_tokens * token_bytes / chip.hbm_bytes_per_s  # nothing to hide it behind
    # The less there is to hide, the better it is hidden.
    latency_s = _exposed_latency_s(shape, config, chip) if shape.is_decode else 0.0
    return max(memory_s, compute_s) + 0.1 * min(memory_s, compute_s) + fixed_s + first_block_s + latency_s


def _exposed_latency_s(shape: PassShape, config: PassConfig, chip: TpuChip) -> float:
    """What copies' latency adds to a step of short rows: as many as there are buffers share it."""
    row_bytes = _SHORT_CONTEXT * shape.num_kv_heads * shape.layout.width * shape.kv_bytes
    copy_s = row_bytes / chip.hbm_bytes_per_s
    return _DECODE_ROWS * max(0.0, (_LATENCY_S + copy_s) / config.num_buffers - copy_s)


def _chunk_seconds(shape: PassShape, config: PassConfig, chip: TpuChip) -> float:
    """Of one query tile and one chunk of keys, all KV heads."""
    layout, tile_rows = shape.layout, _tile_rows(shape, config)
    num_products = -(-tile_rows // PRODUCT_ROWS)
    rows = tile_rows / num_products  # of a product
    # Bringing keys into a matrix unit takes as long as a product with as many rows as it is wide; one that is narrower than
    # the unit takes as long as one that is not.
    lanes = align(layout.key_lanes, chip.mxu_size) + align(layout.value_lanes, chip.mxu_size)
    flops = 2 * max(rows, chip.mxu_size / 2) * config.kv_chunk_tokens * lanes
    vector_ops = rows * (config.kv_chunk_tokens * _VECTOR_OPS_PER_SCORE + 2 * layout.value_lanes + 8 * LANES)
    if shape.kv_dtype in QUANTIZED_DTYPES:
        if shape.kv_dtype == "int8":  # float8 is multiplied as it is
            vector_ops += _CONVERT_OPS * config.kv_chunk_tokens * layout.width
        vector_ops += 2 * rows * config.kv_chunk_tokens
    chain_s = _PRODUCT_S + _CHAIN_S * min(1, rows / 256) / (config.head_unroll * num_products)
    product_s = max(flops / chip.bf16_flops_per_s, vector_ops / chip.vector_ops_per_s) + chain_s
    return product_s * num_products * shape.num_kv_heads
