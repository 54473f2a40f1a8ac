"""What XLA is told beside a program, by platform. On CPUs and TPUs that is nothing."""

from __future__ import annotations

import os

_GPU: dict[str, str | bool] = {
    # All products by cuBLASLt, which adds the residual while it stores. XLA's own, in Triton, are split along K by a rule, not
    # by a timing, with one kernel more to add up the parts and one for the residual: 12 to 15 launches a layer of Llama-3.1-8B
    # instead of 10. Their candidates would also be timed at start-up, for every shape; and where no device can time them
    # (`jaxserve compile`), XLA takes tiles of 16 x 8.
    "xla_gpu_enable_triton_gemm": False,
    # A program is one CUDA graph, which XLA calls a command buffer. Beside what XLA puts in by itself: loops. The sampler has
    # some, of known length: they are unrolled into the graph, where otherwise they would cut it and launch kernel by kernel.
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE",
    "xla_gpu_command_buffer_unroll_loops": True,
    # A KV cache that fills the device is more than XLA thinks a program may have, and it computes small arrays that all layers
    # share anew for each, to save memory: with Llama-3.1-8B of two layers 39 launches instead of 34. It saves nothing here.
    "xla_disable_hlo_passes": "rematerialization",
}


# cuBLASLt reads no int8 beside bfloat16: in front of it, every step would write its weights out as bfloat16. Triton's kernels
# convert what they have loaded.
_NOT_IF_QUANTIZED = ("xla_gpu_enable_triton_gemm",)


# Processes that share the timing of candidates wait for each other in every compilation. Ours need not compile the same at the
# same time: one may find in its cache what another has to compile.
_SEVERAL_PROCESSES: dict[str, str | bool] = {"xla_gpu_shard_autotuning": False}

# No kernel that adds up in the order in which its threads come, and none that was the fastest on this machine today.
_DETERMINISTIC: dict[str, str | bool] = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_autotune_level": "0"}


def compiler_options(
    platform: str, *, quantized: bool = False, several_processes: bool = False, deterministic: bool = False
) -> dict[str, str | bool] | None:
    """For jax.jit; `quantized` says that matrices are (`--quantization`), `deterministic` is
    `--enable-deterministic-inference`. What XLA_FLAGS speaks of is left to it."""
    if platform != "gpu":
        return None
    flags = os.environ.get("XLA_FLAGS", "")
    unsaid = _NOT_IF_QUANTIZED if quantized else ()
    options = _GPU | (_SEVERAL_PROCESSES if several_processes else {}) | (_DETERMINISTIC if deterministic else {})
    return {name: value for name, value in options.items() if f"--{name}" not in flags and name not in unsaid}
