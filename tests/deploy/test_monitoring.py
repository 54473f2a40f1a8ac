"""deploy/prometheus and deploy/grafana: every metric they name exists, promtool takes the files, alerts fire when they must."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from jaxserve.metrics import FAMILIES, PREFIX

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
SUFFIXES = ("_bucket", "_sum", "_count")


def panels() -> list[dict[str, Any]]:
    board = json.loads((DEPLOY / "grafana" / "jaxserve.json").read_text())
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_of(expression: str) -> set[str]:
    return set(re.findall(rf"{PREFIX}([a-z0-9_]+)", expression))


def test_every_metric_exists() -> None:
    known = set(FAMILIES)
    for name, family in FAMILIES.items():
        if family.kind == "histogram":
            known.remove(name)
            known |= {name + suffix for suffix in SUFFIXES}
    board = metrics_of((DEPLOY / "grafana" / "jaxserve.json").read_text())
    alerts = metrics_of((PROMETHEUS / "alerts.yml").read_text()) | metrics_of((PROMETHEUS / "alerts_test.yml").read_text())
    assert len(board) > 40 and len(alerts) >= 9
    assert board <= known, f"the board names {sorted(board - known)}"
    assert alerts <= known, f"the alerts name {sorted(alerts - known)}"


def test_labels_exist() -> None:
    common = {"model_name", "instance", "engine_type", "dp_rank", "le", "job"}
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]
    for expression in expressions:
        labels = {label for name in metrics_of(expression) for label in FAMILIES[_family(name)].labels}
        used = set(re.findall(r"[{,]\s*(\w+)\s*[=!]~?", expression))
        for by in re.findall(r"by \(([^)]*)\)", expression):
            used |= {name.strip() for name in by.split(",")}
        assert used <= labels | common, f"{expression}: {sorted(used - labels - common)}"


def _family(name: str) -> str:
    return name if name in FAMILIES else name.rsplit("_", 1)[0]


def test_the_board_is_whole() -> None:
    everything = json.loads((DEPLOY / "grafana" / "jaxserve.json").read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells


def promtool(*arguments: str) -> None:
    assert shutil.which("promtool"), "promtool is missing: make debian-tools (Debian's package prometheus)"
    result = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "check", [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")]
)
def test_promtool_takes_it(check: tuple[str, ...]) -> None:
    promtool(*check)


def test_every_alert_is_tested() -> None:
    names = {rule["alert"] for rule in rules()}
    for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]:
        assert {one["alertname"] for one in case["alert_rule_test"]} == names
