"""gpt-oss, plain and with its experts in mxfp4; and DeepSeek V3 in blocks of float8."""

from __future__ import annotations

from typing import Any

import numpy as np

from model_families.case import Case, Served, rope
from model_families.deepseek import v3

_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
_GPT_OSS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "rope_parameters": _YARN,
    "swiglu_limit": 1.5,
}
FP8_BLOCK = (16, 32)


def _in_mxfp4(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The oracle's experts are of such numbers already (`_of_few_values`): what is written stands for just those."""
    import torch

    stored = {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        rows = tensor.swapaxes(1, 2).numpy()  # [experts, out, in]
        groups = rows.reshape(*rows.shape[:2], -1, 32)
        scales = np.full(groups.shape[:3], 127 - 4, np.uint8)
        codes = np.abs(groups[..., None] * 16 - E2M1).argmin(-1).astype(np.uint8)
        blocks = codes[..., 0::2] | codes[..., 1::2] << 4
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
    return {**raw, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}, stored


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _of_few_values(model: Any) -> None:
    """Rounds the experts to numbers that mxfp4 has with a scale of 1 / 16."""
    import torch

    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            values = torch.from_numpy(E2M1) / 16
            nearest = (parameter[..., None] - values).abs().argmin(-1)
            parameter.copy_(values[nearest])


def _in_fp8(raw: dict[str, Any], tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The oracle's matrices are of such numbers already (`_of_float8`): what is written stands for just those."""
    import torch

    stored = dict(tensors)
    for name, tensor in tensors.items():
        if is_in_fp8(name, tensor):
            scales = _scales(tensor.shape)
            stored[name] = (tensor / _spread(scales, tensor.shape)).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
    return {**raw, "quantization_config": {"quant_method": "fp8", "weight_block_size": list(FP8_BLOCK)}}, stored


def is_in_fp8(name: str, tensor: Any) -> bool:
    return (tensor.ndim == 2 and name.endswith("_proj.weight")) or name.endswith("with_mqa.weight")


def _of_float8(model: Any) -> None:
    import torch

    for name, parameter in model.named_parameters():
        matrices = parameter if parameter.ndim == 3 else parameter[None]
        if is_in_fp8(name, parameter) or ("experts." in name and parameter.ndim == 3):
            for matrix in matrices:
                # Experts stand together here and apart in files, gate and up one after the other.
                for part in matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,):
                    scales = _spread(_scales(part.shape), part.shape)
                    part.copy_((part / scales).to(torch.float8_e4m3fn).float() * scales)


def _scales(shape: Any) -> Any:
    """One for each block, powers of two so that products with them are exact."""
    import torch

    rows, columns = (-(-size // block) for size, block in zip(shape, FP8_BLOCK, strict=True))
    return 2.0 ** -(4 + (torch.arange(rows)[:, None] + torch.arange(columns)) % 3).float()


def _spread(scales: Any, shape: Any) -> Any:
    wide = scales.repeat_interleave(FP8_BLOCK[0], 0).repeat_interleave(FP8_BLOCK[1], 1)
    return wide[: shape[0], : shape[1]]


CASES: dict[str, Case] = {
    "gpt-oss": Case("GptOss", {**_GPT_OSS, "vocab_size": 503}),
    "gpt-oss-mxfp4": Case("GptOss", {**_GPT_OSS, "head_dim": 32}, rewrite=_in_mxfp4, prepare=_of_few_values),
    "deepseek-v3-fp8": Case("DeepseekV3", **v3(hidden_size=80), rewrite=_in_fp8, prepare=_of_float8),
}
LIVE = [
    Served("gpt-oss", page_size=16, chunk=32, tp=2, ep=1, mixed=True),
]
IN_PROCESS = [
    Served("gpt-oss-mxfp4", page_size=1, chunk=48, pp=3, drafts=True),
]
