"""Formats in which models call tools, one file each; TOOL_FORMATS has them by the names that SGLang gave them."""

from __future__ import annotations

from jaxserve.parsers.base import ToolFormat
from jaxserve.parsers.tools.deepseekv3 import DeepSeekV3Format
from jaxserve.parsers.tools.deepseekv31 import DeepSeekV31Format
from jaxserve.parsers.tools.deepseekv32 import DeepSeekV32Format
from jaxserve.parsers.tools.glm45 import Glm45Format
from jaxserve.parsers.tools.gpt_oss import GptOssFormat
from jaxserve.parsers.tools.json_array import JsonArrayFormat
from jaxserve.parsers.tools.kimi_k2 import KimiK2Format
from jaxserve.parsers.tools.llama3 import Llama3Format
from jaxserve.parsers.tools.minimax_m2 import MinimaxM2Format
from jaxserve.parsers.tools.mistral import MistralFormat
from jaxserve.parsers.tools.pythonic import PythonicFormat
from jaxserve.parsers.tools.qwen3_coder import Qwen3CoderFormat
from jaxserve.parsers.tools.qwen25 import Qwen25Format
from jaxserve.parsers.tools.step3 import Step3Format

_QWEN25 = Qwen25Format()
_QWEN3_CODER = Qwen3CoderFormat()
_GLM45 = Glm45Format()
TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseekv3": DeepSeekV3Format(),
    "deepseekv31": DeepSeekV31Format(),
    "deepseekv32": DeepSeekV32Format(),
    "deepseekv4": DeepSeekV32Format("tool_calls"),
    "glm": _GLM45,
    "glm45": _GLM45,
    "glm47": Glm45Format(has_line_breaks=False),
    "gpt-oss": GptOssFormat(),
    "hermes": _QWEN25,
    "json_array": JsonArrayFormat(),
    "kimi_k2": KimiK2Format(),
    "llama3": Llama3Format(),
    "mimo": _QWEN3_CODER,
    "minimax-m2": MinimaxM2Format(),
    "mistral": MistralFormat(),
    "pythonic": PythonicFormat(),
    "qwen": _QWEN25,
    "qwen25": _QWEN25,
    "qwen3_coder": _QWEN3_CODER,
    "step3": Step3Format(),
    "step3p5": _QWEN3_CODER,
}
