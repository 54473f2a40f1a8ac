"""The names of the formats, for whoever needs no more of them: options are read without the parsers. A test compares them."""

REASONING_NAMES = (
    "deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4", "glm45", "gpt-oss", "interns1", "kimi", "kimi_k2", "mimo",
    "minimax", "minimax-m3", "mistral", "nano_v3", "nemotron_3", "poolside_v1", "qwen3", "qwen3-thinking", "step3",
    "step3p5",
)  # fmt: skip
TOOL_NAMES = (
    "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "glm", "glm45", "glm47", "gpt-oss", "hermes",
    "json_array", "kimi_k2", "llama3", "mimo", "minimax-m2", "mistral", "pythonic", "qwen", "qwen25", "qwen3_coder",
    "step3", "step3p5",
)  # fmt: skip
