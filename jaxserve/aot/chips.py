"""What the chips are that we compile for: the numbers behind capacity and roofline. A table with sources; nothing was measured.

One entry is one JAX device: a TPU chip of v5e, v5p or v6e, one of the two halves of a TPU7x chip, one GPU.
"""

from __future__ import annotations

import dataclasses

from jaxserve.executor.mesh import GPU_MEMORY_SHARE

GIB = 1 << 30
GPUS_PER_HOST = 8  # at most


@dataclasses.dataclass(frozen=True)
class ChipSpec:
    """Of one JAX device. Bandwidths in bytes per second, peaks in operations per second (a multiply-add is two)."""

    name: str
    kind: str  # jax.Device.device_kind
    platform: str  # tpu or gpu
    devices_per_chip: int
    hbm_bytes: int  # what programs may use
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    int8_ops_per_s: float
    fp8_flops_per_s: float
    float32_flops_per_s: float  # of a matmul that is computed in full float32
    scratchpad_bytes: int  # VMEM of a TPU core, shared memory of a GPU's multiprocessor
    # One direction of one link between chips; a GPU has one, to the switch. None: devices of a chip share no faster one.
    link_bytes_per_s: float
    in_chip_bytes_per_s: float | None = None  # one direction between the devices of one chip
    network_bytes_per_s: float | None = None  # one direction from this device to other hosts; None: links go there, too
    wrapped_axis: int = 0  # a torus axis of this size, or a multiple of it, closes into a ring
    warning: str = ""  # what a plan should say of it

    def flops_per_s(self, dtype: str) -> float:
        """Peak of matmuls whose operands have this type."""
        peaks = {"float32": self.float32_flops_per_s, "int8": self.int8_ops_per_s, "float8_e4m3fn": self.fp8_flops_per_s}
        return peaks.get(dtype, self.bf16_flops_per_s)


def _tpu(bf16_flops_per_s: float, **fields: object) -> ChipSpec:
    # Lax.Precision.HIGHEST is six passes in bfloat16 on a TPU's matrix units.
    return ChipSpec(
        platform="tpu",
        bf16_flops_per_s=bf16_flops_per_s,
        float32_flops_per_s=bf16_flops_per_s / 6,
        **fields,  # type: ignore[arg-type]
    )


# hbm_bytes of the TPUs: what libtpu 0.0.48 (JAX 0.11.2) calls "available HBM" when it refuses a program as too large.
# VMEM: pltpu.get_tpu_info() of the same JAX.
# Links: Google's "bidirectional ICI bandwidth per chip", over the ports of the chip, over two directions.
V5E = _tpu(
    # docs.cloud.google.com/tpu/docs/v5e: 197 TFLOP/s bf16, 393 TOP/s int8, 819 GB/s, 400 GB/s ICI over 4 ports.
    name="v5e",
    kind="TPU v5 lite",
    devices_per_chip=1,
    hbm_bytes=int(15.75 * GIB),
    hbm_bytes_per_s=819e9,
    bf16_flops_per_s=197e12,
    int8_ops_per_s=393e12,
    fp8_flops_per_s=197e12,  # no fp8 in the matrix units: computed in bfloat16
    scratchpad_bytes=128 << 20,
    link_bytes_per_s=400e9 / 4 / 2,
    wrapped_axis=16,  # the whole pod, 16x16, is the only torus
)
V5P = _tpu(
    # docs.cloud.google.com/tpu/docs/v5p: 459 TFLOP/s bf16, 918 TOP/s int8, 2765 GB/s, 1200 GB/s ICI over 6 ports.
    name="v5p",
    kind="TPU v5",
    devices_per_chip=1,
    hbm_bytes=int(95.73 * GIB),
    hbm_bytes_per_s=2765e9,
    bf16_flops_per_s=459e12,
    int8_ops_per_s=918e12,
    fp8_flops_per_s=459e12,
    scratchpad_bytes=64 << 20,
    link_bytes_per_s=1200e9 / 6 / 2,
    wrapped_axis=4,
    warning="A v5p device is two cores, and the attention kernels run on one of them: peaks are those of both.",
)
V6E = _tpu(
    # docs.cloud.google.com/tpu/docs/v6e: 918 TFLOP/s bf16, 1836 TOP/s int8, 1638 GB/s, 800 GB/s ICI over 4 ports.
    name="v6e",
    kind="TPU v6 lite",
    devices_per_chip=1,
    hbm_bytes=int(31.24 * GIB),
    hbm_bytes_per_s=1638e9,
    bf16_flops_per_s=918e12,
    int8_ops_per_s=1836e12,
    fp8_flops_per_s=918e12,
    scratchpad_bytes=128 << 20,
    link_bytes_per_s=800e9 / 4 / 2,
    wrapped_axis=16,
)
TPU7X = _tpu(
    # docs.cloud.google.com/tpu/docs/tpu7x, per chip of two devices: 2307 TFLOP/s bf16, 4614 fp8, 7380 GB/s, 1200 GB/s ICI over
    # 6 ports; its two halves are joined at six times the bandwidth of a one-dimensional ICI link. int8: not stated, as bf16.
    name="tpu7x",
    kind="TPU7x",
    devices_per_chip=2,
    hbm_bytes=int(94.74 * GIB),
    hbm_bytes_per_s=7380e9 / 2,
    bf16_flops_per_s=2307e12 / 2,
    int8_ops_per_s=2307e12 / 2,
    fp8_flops_per_s=4614e12 / 2,
    scratchpad_bytes=64 << 20,
    link_bytes_per_s=1200e9 / 6 / 2,
    in_chip_bytes_per_s=6 * 1200e9 / 6 / 2,
    wrapped_axis=4,
)
H200 = ChipSpec(
    # NVIDIA H200 data sheet (SXM): 4.8 TB/s, 989.5 TFLOP/s bf16, 1979 fp8 and int8 (dense), 67 float32, NVLink 900 GB/s in both
    # directions together. Memory: the share that JAX takes of h200.txtpb's device_memory_size. Shared memory: 227 KiB for a
    # block, CUDA's table for compute capability 9.0. Network: DGX H200 data sheet, a ConnectX-7 of 400 Gb/s for each GPU.
    name="h200",
    kind="NVIDIA H200",
    platform="gpu",
    devices_per_chip=1,
    hbm_bytes=int(GPU_MEMORY_SHARE * 151397597184),
    hbm_bytes_per_s=4.8e12,
    bf16_flops_per_s=989.5e12,
    int8_ops_per_s=1979e12,
    fp8_flops_per_s=1979e12,
    float32_flops_per_s=67e12,
    scratchpad_bytes=227 << 10,
    link_bytes_per_s=450e9,
    network_bytes_per_s=400e9 / 8,
    warning="XLA chooses among matmuls by timing them on the device: without it, temporaries may be others than a server's.",
)

CHIPS = {chip.name: chip for chip in (V5E, V5P, V6E, TPU7X, H200)}
