"""What is charted exists: the dashboard, the scrape config and the page of metrics speak of the same names and labels."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from metrics_table import documented

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
GRAFANA = COMPOSE / "grafana"
_NAME = re.compile(r"\b((?:draftwire|grpc_server|process)_\w+)\s*(\{[^}]*\})?")
_FROM_THE_SCRAPE = {"instance", "job"}


def panels() -> list[dict[str, Any]]:
    board = json.loads((GRAFANA / "dashboards" / "draftwire.json").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = board["panels"]
    return found


def queries() -> list[tuple[str, str, str]]:
    """(panel, expression, legend)."""
    return [
        (panel["title"], query["expr"], query["legendFormat"])
        for panel in panels()
        for query in panel.get("targets", ())
    ]


def rows() -> dict[str, Any]:
    """Every documented metric of both services."""
    return documented("target", "both") | documented("draft")


def labels_of(name: str) -> set[str]:
    """Labels that the table gives a sample. Raises KeyError where no metric has it."""
    table = rows()
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if name.endswith(suffix) and base in table and table[base].type == "histogram":
            return set(table[base].labels) | ({"le"} if suffix == "_bucket" else set())
    assert table[name].type != "histogram", f"{name} has no sample of that name"
    return set(table[name].labels)


def test_the_dashboard_is_the_one_that_is_made() -> None:
    """Stale: run `python compose/grafana/make_dashboard.py`."""
    spec = importlib.util.spec_from_file_location("make_dashboard", GRAFANA / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up while it is made.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    assert (GRAFANA / "dashboards" / "draftwire.json").read_text(encoding="utf-8") == module.text()


@pytest.mark.parametrize(("panel", "expression", "legend"), queries(), ids=lambda value: value[:40])
def test_each_query_is_about_documented_metrics(panel: str, expression: str, legend: str) -> None:
    """Names, the labels that are matched or grouped by, and those of the legend."""
    names = [match for match in _NAME.findall(expression)]
    assert names, panel
    known = set.intersection(*(labels_of(name) for name, _ in names)) | _FROM_THE_SCRAPE
    for name, matchers in names:
        assert set(re.findall(r"(\w+)\s*=~?", matchers)) <= labels_of(name) | _FROM_THE_SCRAPE, expression
    for grouped in re.findall(r"by \(([^)]*)\)", expression):
        assert {label.strip() for label in grouped.split(",")} <= known, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= {label.strip() for label in grouped.split(",")}, legend
    for counter in re.findall(r"rate\((\w+)", expression):
        assert counter.endswith(("_total", "_bucket", "_sum", "_count")), "only what grows has a rate"
    assert expression.count("(") == expression.count(")")


def test_every_metric_that_an_operator_asks_for_is_charted() -> None:
    """What the issue names, at least."""
    text = "\n".join(expression for _, expression, _ in queries())
    for name in (
        "draftwire_time_to_first_token_seconds",
        "draftwire_inter_token_latency_seconds",
        "draftwire_spec_decode_num_accepted_tokens_per_pos_total",
        "draftwire_num_requests_waiting",
        "draftwire_batch_size",
        "draftwire_draft_batch_size",
        "draftwire_prefix_cache_hits_total",
        "draftwire_draft_prefix_cache_hits_total",
        "draftwire_kv_cache_bytes",
        "draftwire_draft_rpc_seconds",
        "draftwire_rounds_without_draft_total",
        "draftwire_drafter_failovers_total",
        "draftwire_drafter_state",
    ):
        assert name in text, name


def test_panels_do_not_cover_each_other() -> None:
    places = [panel["gridPos"] for panel in panels()]
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert len({panel["id"] for panel in panels()}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_expressions_of_the_page_are_about_documented_metrics() -> None:
    """The quotients that docs/metrics.md recommends."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    expressions = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(expressions) >= 5
    for expression in expressions:
        for name, _ in _NAME.findall(expression):
            labels_of(name)


def test_prometheus_finds_both_services_by_name() -> None:
    """By DNS, so that more drafters need no other configuration; jobs are those that the dashboard selects."""
    config = yaml.safe_load((COMPOSE / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for job, name in (("draftwire-target", "target"), ("draftwire-draft", "draft")):
        (found,) = jobs[job]["dns_sd_configs"]
        assert (found["names"], found["type"], found["port"]) == ([name], "A", 9464)
        assert f'job=\\"{job}\\"' in (GRAFANA / "dashboards" / "draftwire.json").read_text(encoding="utf-8")


def test_grafana_knows_its_source_and_its_dashboards() -> None:
    """The uid that panels name is the provisioned one; the folder is where compose.yaml mounts them."""
    provisioning = GRAFANA / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text(encoding="utf-8"))
    (source,) = sources["datasources"]
    used = {panel["datasource"]["uid"] for panel in panels() if panel["type"] != "row"}
    assert used == {source["uid"]}
    boards = yaml.safe_load((provisioning / "dashboards" / "draftwire.yml").read_text(encoding="utf-8"))
    assert boards["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
