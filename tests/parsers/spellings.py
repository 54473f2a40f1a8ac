"""How each tool format writes calls, as the models' chat templates do; the test's own, beside the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]
Spelling = Callable[[Sequence[Call]], str]
One = Callable[[int, str, dict[str, Any]], str]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def each(
    begin: str, end: str, separator: str, one: Callable[[int, str, dict[str, Any]], str]
) -> Callable[[Sequence[Call]], str]:
    def spelling(calls: Sequence[Call]) -> str:
        return begin + separator.join(one(count, name, args) for count, (name, args) in enumerate(calls)) + end

    return spelling


def qwen25(_: int, name: str, args: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {dumps(args)}}}\n</tool_call>'


def listed(key: str) -> One:
    return lambda _, name, args: f'{{"name": "{name}", "{key}": {dumps(args)}}}'


def deepseekv3(_: int, name: str, args: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(args)}\n```<｜tool▁call▁end｜>"


def deepseekv31(_: int, name: str, args: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(args)}<｜tool▁call▁end｜>"


def dsml(_: int, name: str, args: dict[str, Any]) -> str:
    parameters = "".join(
        f'<｜DSML｜parameter name="{key}" string="{dumps(isinstance(value, str))}">{bare(value)}</｜DSML｜parameter>\n'
        for key, value in args.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>'


def glm(line: str) -> One:
    def one(_: int, name: str, args: dict[str, Any]) -> str:
        parameters = "".join(
            f"<arg_key>{key}</arg_key>{line}<arg_value>{bare(value)}</arg_value>{line}" for key, value in args.items()
        )
        return f"<tool_call>{name}{line}{parameters}</tool_call>"

    return one


def harmony(_: int, name: str, args: dict[str, Any]) -> str:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{dumps(args)}<|call|>"


def kimi_k2(count: int, name: str, args: dict[str, Any]) -> str:
    return f"<|tool_call_begin|>functions.{name}:{count}<|tool_call_argument_begin|>{dumps(args)}<|tool_call_end|>"


def minimax(_: int, name: str, args: dict[str, Any]) -> str:
    parameters = "".join(f'<parameter name="{key}">{bare(value)}</parameter>\n' for key, value in args.items())
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def pythonic(_: int, name: str, args: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"


def pythonic_json(_: int, name: str, args: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={dumps(value)}' for key, value in args.items())})"


def qwen3_coder(_: int, name: str, args: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in args.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def step3(_: int, name: str, args: dict[str, Any]) -> str:
    parameters = "".join(f'<steptml:parameter name="{key}">{bare(v)}</steptml:parameter>\n' for key, v in args.items())
    invoke = f'<steptml:invoke name="{name}">\n{parameters}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"


# By the names of --tool-call-parser; what is written in several ways stands under further names, behind a slash.
SPELLINGS: dict[str, Spelling] = {
    "deepseekv3": each("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "\n", deepseekv3),
    "deepseekv31": each("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "", deepseekv31),
    "deepseekv32": each("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>", "\n", dsml),
    "deepseekv4": each("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>", "\n", dsml),
    "glm45": each("", "", "\n", glm("\n")),
    "glm47": each("", "", "", glm("")),
    "gpt-oss": each("", "", "", harmony),
    "json_array": each("[", "]", ", ", listed("parameters")),
    "kimi_k2": each("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "", kimi_k2),
    "llama3": each("<|python_tag|>", "", "; ", listed("parameters")),
    "llama3/python": each("<|python_tag|>", "", ";", lambda _, name, args: repr({"name": name, "parameters": args})),
    "minimax-m2": each("<minimax:tool_call>\n", "\n</minimax:tool_call>", "\n", minimax),
    "mistral": each("[TOOL_CALLS] [", "]", ", ", listed("arguments")),
    "mistral/ARGS": each("", "", "", lambda _, name, args: f"[TOOL_CALLS]{name}[ARGS]{dumps(args)}"),
    "mistral/CALL_ID": each("", "", "", lambda n, name, args: f"[TOOL_CALLS]{name}[CALL_ID]id{n}[ARGS]{dumps(args)}"),
    "pythonic": each("[", "]", ", ", pythonic),
    "pythonic/json": each("[", "]", ", ", pythonic_json),
    "pythonic/tags": each("<|python_start|>[", "]<|python_end|>", ", ", pythonic),
    "qwen25": each("", "", "\n", qwen25),
    "qwen3_coder": each("", "", "\n", qwen3_coder),
    "step3": each("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>", "\n", step3),
}
