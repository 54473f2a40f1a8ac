"""Turns every "auto" of ServerArgs into a number, given the model and the platform. Returns new ServerArgs."""

from __future__ import annotations

import dataclasses

from jaxserve.config import ServerArgs
from jaxserve.config.lora import split_lora_path
from jaxserve.executor.buckets import SMALLEST_TOKEN_BUCKET, powers_up_to
from jaxserve.models.adapters.layout import ALL_MODULES
from jaxserve.models.adapters.peft_files import largest_rank, target_suffixes

DEFAULT_LORA_RANK = 64
# Of models that make vectors: a text costs no line of logits, and is short.
TEXTS_AT_A_TIME = 256


@dataclasses.dataclass(frozen=True)
class PlatformDefaults:
    dtype: str
    max_running_requests: int
    chunked_prefill_size: int
    fewest_decode_rows: int  # of a decode bucket
    decode_row_factor: int  # decode row buckets grow by it
    mem_fraction_static: float
    num_draft_tokens: int  # of a row that a step verifies, when drafting
    one_step_size: int  # tokens and rows of all steps, where they are of one size


# float32 on CPU: a small decode step takes 0.8 ms there, in bfloat16 3.1 ms (JAX 0.10.2, 2 cores).
_CPU = PlatformDefaults("float32", 64, 1024, 1, 2, 0.5, 4, 64)
_TPU = PlatformDefaults("bfloat16", 256, 8192, 1, 2, 0.9, 8, 256)
# XLA pads products of fewer than 8 rows to 8, with kernels of their own: a layer has 16 launches then instead of 10.
_GPU = dataclasses.replace(_TPU, fewest_decode_rows=8)


def platform_defaults(platform: str) -> PlatformDefaults:
    return {"cpu": _CPU, "gpu": _GPU}.get(platform, _TPU)


def resolve_dtype(args: ServerArgs, platform: str) -> str:
    return platform_defaults(platform).dtype if args.dtype == "auto" else args.dtype


def resolve_args(
    args: ServerArgs,
    *,
    platform: str,
    model_context_len: int,
    page_size: int,
    generates: bool = True,
    is_causal: bool = True,
) -> ServerArgs:
    """ValueError, naming both options, where explicit ones contradict each other or the model. `generates`, `is_causal`: the
    model's. An encoder's texts are never split, and nothing is kept of them: --chunked-prefill-size is what steps have."""
    defaults = platform_defaults(platform)
    if args.enable_deterministic_inference:
        args = _for_one_step_size(args, defaults, page_size * args.dcp_size)
    context_len = args.context_length or model_context_len
    if context_len > model_context_len:
        raise ValueError(f"--context-length must be at most the model's {model_context_len}; got {context_len}.")
    max_rows = args.max_running_requests or (defaults.max_running_requests if generates else TEXTS_AT_A_TIME)
    page_tokens = page_size * args.dcp_size
    chunk = args.chunked_prefill_size or min(defaults.chunked_prefill_size, args.max_prefill_tokens)
    if not is_causal:
        most_tokens, chunk = max(chunk, context_len), -1
    elif chunk != -1:
        chunk = max(chunk // page_tokens, 1) * page_tokens  # chunk borders are page borders
        most_tokens = chunk
    else:
        most_tokens = max(args.max_prefill_tokens, context_len)
    most_tokens = min(most_tokens, max_rows * context_len)
    if args.enable_mixed_chunk and generates:
        most_tokens = max(most_tokens, max_rows + page_tokens)  # all decode rows and at least one page of prompt

    tokens = args.prefill_token_buckets or powers_up_to(SMALLEST_TOKEN_BUCKET, 4 if generates else 2, most_tokens)
    rows = args.decode_row_buckets or powers_up_to(defaults.fewest_decode_rows, defaults.decode_row_factor, max_rows)
    if args.enable_deterministic_inference:
        tokens = rows = (defaults.one_step_size,)
    else:
        tokens, rows = _reach(tokens, most_tokens), _reach(rows, max_rows)
    return args.replace(
        context_length=context_len,
        dtype=resolve_dtype(args, platform),
        max_running_requests=max_rows,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=args.enable_mixed_chunk and generates,
        disable_radix_cache=args.disable_radix_cache or not is_causal,
        speculative_num_draft_tokens=_num_draft_tokens(args, defaults),
        mem_fraction_static=args.mem_fraction_static or defaults.mem_fraction_static,
        prefill_token_buckets=tokens,
        decode_row_buckets=rows,
    )


def _for_one_step_size(args: ServerArgs, defaults: PlatformDefaults, page_tokens: int) -> ServerArgs:
    """With chunks and requests as many as a step may hold where nothing was said. The size is the platform's, not an option's:
    else servers with other options would compute other sums. ValueError for what no such step holds."""
    size, mixed = defaults.one_step_size, args.enable_mixed_chunk
    most_rows = size - page_tokens if mixed else size  # beside a page of a prompt
    limits = {"page_size": (page_tokens, size), "chunked_prefill_size": (args.chunked_prefill_size or size, size)}
    limits["max_running_requests"] = (args.max_running_requests or most_rows, most_rows)
    for name, (value, most) in limits.items():
        if not 1 <= value <= most:
            rest = " and --enable-mixed-chunk" if mixed and name == "max_running_requests" else ""
            raise ValueError(
                f"--{name.replace('_', '-')} must be in [1, {most}] with --enable-deterministic-inference{rest}, whose steps "
                f"all have {size} tokens; got {value}."
            )
    for name in ("prefill_token_buckets", "decode_row_buckets"):
        if getattr(args, name) not in (None, (size,)):
            raise ValueError(f"--{name.replace('_', '-')} must be {size} or unset with --enable-deterministic-inference.")
    values = {name: value for name, (value, _) in limits.items() if name != "page_size"}
    return args.replace(**values)


def resolve_lora(args: ServerArgs) -> ServerArgs:
    """What slots for adapters hold, by the adapters that are loaded at the start where options do not say it. ValueError or
    OSError with a sentence for a folder that cannot be read."""
    if not args.serves_lora:
        return args
    rank, targets = args.max_lora_rank, args.lora_target_modules
    folders = [split_lora_path(text)[1] for text in args.lora_paths or ()]
    if folders and rank is None:
        rank = max(map(largest_rank, folders))
    if folders and targets is None:
        targets = tuple(sorted(frozenset().union(*map(target_suffixes, folders))))
    return args.replace(max_lora_rank=rank or DEFAULT_LORA_RANK, lora_target_modules=targets or (ALL_MODULES,))


def with_lora_of(args: ServerArgs, resolved: ServerArgs) -> ServerArgs:
    """The same options, with slots for adapters as they were resolved: folders may have changed since."""
    return args.replace(max_lora_rank=resolved.max_lora_rank, lora_target_modules=resolved.lora_target_modules)


def _reach(sizes: tuple[int, ...], last: int) -> tuple[int, ...]:
    """Buckets cut at, and completed to, the largest step there can be."""
    return (*(size for size in sizes if size < last), last)


def _num_draft_tokens(args: ServerArgs, defaults: PlatformDefaults) -> int | None:
    if args.speculative_algorithm is None:
        return None
    return args.speculative_num_draft_tokens or defaults.num_draft_tokens
