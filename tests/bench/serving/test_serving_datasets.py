"""Prompts: as long as asked for, the same for the same seed, read from files as SGLang reads them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.bench.serving.datasets import arrivals, make_tasks
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.tokens import Tokens
from jaxserve.bench.serving.work import Task

DEMO = Tokens.load("demo")


def tasks_of(**options: Any) -> list[Task]:
    return make_tasks(ServingOptions(**({"num_prompts": 12, "random_input_len": 50, "random_output_len": 20} | options)), DEMO)


def test_random_prompts_have_the_length_that_is_asked_for() -> None:
    tasks = tasks_of(random_range_ratio=1.0)
    assert [DEMO.prompt_len(str(task.turns[0])) for task in tasks] == [50] * 12
    assert {(task.prompt_len, task.output_len) for task in tasks} == {(50, 20)}
    assert tasks == tasks_of(random_range_ratio=1.0) != tasks_of(random_range_ratio=1.0, seed=1)


def test_lengths_within_the_range() -> None:
    tasks = tasks_of(num_prompts=200, random_range_ratio=0.5, tokenize_prompt=True)
    assert {len(task.turns[0]) for task in tasks} == set(range(25, 51))
    assert {task.output_len for task in tasks} == set(range(10, 21))
    assert all(len(task.turns[0]) == task.prompt_len for task in tasks)


def test_random_text_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Only these words stand here. ")
    (task,) = tasks_of(num_prompts=1, dataset_path=str(path), random_range_ratio=1.0)
    assert "words stand" in str(task.turns[0])


def test_random_ids_are_no_special_tokens() -> None:
    tasks = tasks_of(dataset_name="random-ids", tokenize_prompt=True, random_range_ratio=1.0)
    assert all(len(task.turns[0]) == 50 and set(task.turns[0]) <= set(DEMO.plain_ids) for task in tasks)
    texts = tasks_of(dataset_name="random-ids")
    assert all(task.prompt_len == DEMO.prompt_len(str(task.turns[0])) for task in texts)


def test_groups_share_their_prefix() -> None:
    options = {"gsp_num_groups": 2, "gsp_prompts_per_group": 3, "gsp_system_prompt_len": 40, "gsp_question_len": 9}
    tasks = tasks_of(dataset_name="generated-shared-prefix", gsp_ordered=True, **options)
    prefixes = [str(task.turns[0]).partition("\n\n")[0] for task in tasks]
    assert [prefixes.count(one) for one in prefixes] == [3] * 6
    assert prefixes[:3] == [prefixes[0]] * 3
    assert {task.output_len for task in tasks} == {256}
    shuffled = tasks_of(dataset_name="generated-shared-prefix", **options)
    assert shuffled != tasks
    assert sorted(str(task.turns) for task in shuffled) == sorted(str(task.turns) for task in tasks)


def test_conversations_have_their_turns() -> None:
    assert [len(task.turns) for task in tasks_of(dataset_name="multi-turn", num_turns=4)] == [4] * 12


def test_schemas_of_a_file_and_made_up_ones(tmp_path: Path) -> None:
    assert all(task.schema and task.schema["type"] == "object" for task in tasks_of(dataset_name="json-schema"))
    path = tmp_path / "schemas.jsonl"
    path.write_text(json.dumps({"prompt": "One number.", "schema": {"type": "integer"}}) + "\n")
    (task,) = tasks_of(dataset_name="json-schema", dataset_path=str(path))
    assert (task.turns, task.schema) == (["One number."], {"type": "integer"})


TALK = [{"from": "human", "value": "How are you today?"}, {"from": "gpt", "value": "Quite well, thank you."}]


def test_sharegpt_files(tmp_path: Path) -> None:
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"conversations": TALK}, {"conversations": TALK[:1]}, {"conversation": TALK}, {"id": 1}]))
    tasks = tasks_of(dataset_name="sharegpt", dataset_path=str(path))
    assert [task.turns for task in tasks] == [["How are you today?"]] * 2
    assert tasks[0].output_len == len(DEMO.encode(TALK[1]["value"]))
    assert tasks_of(dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=3)[0].output_len == 3
    with pytest.raises(ValueError, match="no prompt"):
        tasks_of(dataset_name="sharegpt", dataset_path=str(path), sharegpt_context_len=4)


@pytest.mark.parametrize(
    ("line", "turns", "output_len"),
    [
        ({"conversations": [{"content": "Good morning to you"}, {"content": "And to you"}]}, ["Good morning to you"], None),
        ({"prompt": "Hello", "output_len": 4}, ["Hello"], 4),
        ({"input_ids": [5, 6], "output_len": 4}, [[5, 6]], 4),
        ({"text": "Hello"}, ["Hello"], 20),
    ],
)
def test_custom_files(line: dict[str, Any], turns: list[Any], output_len: int | None, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    (task,) = tasks_of(dataset_name="custom", dataset_path=str(path))
    assert (task.turns, task.output_len) == (turns, output_len or len(DEMO.encode("And to you")))


@pytest.mark.parametrize(
    "line", ["no json", "[]", '{"output_len": 3}', '{"prompt": "a", "output_len": 0}', '{"messages": [1]}']
)
def test_lines_that_are_no_prompts_are_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1"):
        tasks_of(dataset_name="custom", dataset_path=str(path))


def test_arrivals() -> None:
    def times(**options: Any) -> list[float]:
        return arrivals(ServingOptions(**options), 2000, np.random.default_rng(0))

    assert set(times()) == {0.0}
    steady = times(request_rate=10.0)
    assert steady[0] == 0.0
    assert steady[-1] == pytest.approx(200.0, rel=0.1)
    ramp = times(ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=100.0)
    assert ramp[-1] == pytest.approx(2000 * math.log(100) / 99, rel=0.1)
    gaps = np.diff(ramp)
    assert gaps[:200].mean() > 5 * gaps[-200:].mean()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_prompts": 0}, "--num-prompts must be at least 1"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"request_rate": math.nan}, "--request-rate must be above 0"),
        ({"random_range_ratio": 1.5}, "between 0 and 1"),
        ({"dataset_name": "sharegpt"}, "--dataset-path"),
        ({"tokenize_prompt": True, "backend": "vllm-chat"}, "--tokenize-prompt"),
        ({"extra_request_body": "[]"}, "JSON object"),
        ({"goodput": ("ttft:x",)}, "ttft:MS"),
        ({"goodput": ("ttft:10 e2e:5",)}, "'e2e:5'"),
        ({"header": ("X",)}, "Name=value"),
        ({"ramp_up_strategy": "linear"}, "go together"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0, "request_rate": 1.0}, "not both"),
        ({"port": 70000}, "--port"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ServingOptions(**options)
