"""The example dashboard and alert rules name metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.views.metrics import METRICS

EXAMPLES = Path(__file__).parents[4] / "examples" / "monitoring"
RULES = EXAMPLES / "headrace-alerts.yaml"
DASHBOARD = EXAMPLES / "grafana-dashboard.json"
SAMPLES = {sample: metric for metric in METRICS for sample in metric.samples}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_each_metric_of_an_expression_exists_with_its_labels(expression: str) -> None:
    names = re.findall(r"\b(headrace_\w+)(?:\{([^}]*)\})?", expression)
    assert names
    for name, selectors in names:
        assert name in SAMPLES, name
        given = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selectors))
        assert given <= set(SAMPLES[name].labels), (name, given)


def test_labels_of_rules_and_legends_are_labels_of_their_metrics() -> None:
    shown = [(rule["expr"], " ".join(rule["annotations"].values())) for rule in rules()]
    shown += [(target["expr"], target["legendFormat"]) for panel in panels() for target in panel["targets"]]
    for expression, text in shown:
        known = set().union(*(SAMPLES[name].labels for name in re.findall(r"\bheadrace_\w+", expression)))
        labels = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
        assert labels <= known, (text, labels - known)


def test_what_can_go_wrong_has_an_alert() -> None:
    watched = {name for rule in rules() for name in re.findall(r"\bheadrace_\w+", rule["expr"])}
    assert watched.issuperset(
        {
            "headrace_lag_seconds",
            "headrace_receiver_up",
            "headrace_dead_letters_total",
            "headrace_receiver_disk_free_bytes",
            "headrace_oldest_unfinished_batch_failed_attempts",
        }
    )


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, panel["title"]
        assert at["x"] + at["w"] <= 24, "Grafana's grid has 24 columns"
        taken |= cells


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian package prometheus)")
def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
