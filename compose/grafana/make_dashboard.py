"""Writes dashboards/draftwire.json: `python compose/grafana/make_dashboard.py`. A dashboard is too long to be kept by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "draftwire.json"
_WIDTH = 24
_SOURCE = {"type": "prometheus", "uid": "prometheus"}
_TARGET, _DRAFT = 'instance=~"$target"', 'instance=~"$drafter"'


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. queries: (expression, legend)."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    text: str = ""
    stacked: bool = False


def rate(name: str, by: str = "", where: str = _TARGET) -> str:
    """Increase a second, summed."""
    return f"sum{f' by ({by}) ' if by else ' '}(rate({name}{{{where}}}[$__rate_interval]))"


def ratio(above: str, below: str, by: str = "", where: str = _TARGET) -> str:
    """Quotient of two rates."""
    return f"{rate(above, by, where)} / {rate(below, by, where)}"


def quantiles(name: str, by: str = "", where: str = _TARGET) -> tuple[tuple[str, str], ...]:
    """Median, 95 and 99 of 100."""
    groups = ", ".join(filter(None, ("le", by)))
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (f"histogram_quantile({q}, {rate(f'{name}_bucket', groups, where)})", f"p{q * 100:g}{legend}")
        for q in (0.5, 0.95, 0.99)
    )


def now(name: str, by: str = "", where: str = _TARGET) -> str:
    """A gauge, summed."""
    return f"sum{f' by ({by}) ' if by else ' '}({name}{{{where}}})"


STEM = "draftwire_spec_decode_num_"
ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel("Tokens a second", ((rate("draftwire_generation_tokens_total"), "made"),), kind="stat", width=4),
        Panel("Running", ((now("draftwire_num_requests_running"), "running"),), kind="stat", width=4),
        Panel("Waiting", ((now("draftwire_num_requests_waiting"), "waiting"),), kind="stat", width=4),
        Panel(
            "Tokens a speculative round",
            ((f"1 + {ratio(f'{STEM}accepted_tokens_total', f'{STEM}drafts_total')}", "length"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "KV cache in use",
            ((f"{now('draftwire_kv_cache_bytes')} / {now('draftwire_kv_cache_capacity_bytes')}", "used"),),
            unit="percentunit",
            kind="gauge",
            width=4,
        ),
        Panel(
            "Drafters ready",
            ((f'sum (draftwire_drafter_state{{state="ready", {_TARGET}}})', "ready"),),
            kind="stat",
            width=4,
        ),
    ],
    "Requests": [
        Panel(
            "Tokens a second",
            (
                (rate("draftwire_generation_tokens_total"), "made"),
                (rate("draftwire_prompt_tokens_total"), "prompts"),
            ),
        ),
        Panel(
            "Requests",
            (
                (now("draftwire_num_requests_running"), "running"),
                (now("draftwire_num_requests_waiting"), "waiting"),
            ),
        ),
        Panel(
            "Ends a second",
            (
                (rate("draftwire_request_success_total", "finished_reason"), "{{finished_reason}}"),
                (rate("draftwire_request_failure_total", "reason"), "failed: {{reason}}"),
            ),
            unit="reqps",
            stacked=True,
        ),
        Panel("Time to first token", quantiles("draftwire_time_to_first_token_seconds"), unit="s"),
        Panel(
            "Inter-token latency",
            quantiles("draftwire_inter_token_latency_seconds"),
            unit="s",
            text="Between two deliveries of one stream; a delivery may have several tokens.",
        ),
        Panel("Time per output token", quantiles("draftwire_request_time_per_output_token_seconds"), unit="s"),
        Panel("End to end", quantiles("draftwire_e2e_request_latency_seconds"), unit="s"),
        Panel("Queue", quantiles("draftwire_request_queue_time_seconds"), unit="s"),
        Panel(
            "Prefill and decode, mean",
            tuple(
                (
                    ratio(
                        f"draftwire_request_{phase}_time_seconds_sum", f"draftwire_request_{phase}_time_seconds_count"
                    ),
                    phase,
                )
                for phase in ("prefill", "decode")
            ),
            unit="s",
        ),
    ],
    "Speculation": [
        Panel(
            "Accepted share",
            ((ratio(f"{STEM}accepted_tokens_total", f"{STEM}draft_tokens_total"), "accepted"),),
            unit="percentunit",
        ),
        Panel(
            "Accepted share by position",
            (
                (
                    ratio(f"{STEM}accepted_tokens_per_pos_total", f"{STEM}draft_tokens_per_pos_total", "position"),
                    "{{position}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Drafts a second",
            (
                (rate(f"{STEM}draft_tokens_total"), "verified"),
                (rate(f"{STEM}accepted_tokens_total"), "accepted"),
                (rate(f"{STEM}cut_tokens_total"), "cut"),
            ),
        ),
        Panel(
            "Tokens a round",
            (
                (ratio("draftwire_generation_tokens_total", "draftwire_rounds_total"), "all rounds"),
                (f"1 + {ratio(f'{STEM}accepted_tokens_total', f'{STEM}drafts_total')}", "speculative rounds"),
            ),
        ),
        Panel(
            "Rounds without a draft",
            ((rate("draftwire_rounds_without_draft_total", "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Batch size, mean",
            ((ratio("draftwire_batch_size_sum", "draftwire_batch_size_count"), "sequences of a forward"),),
        ),
    ],
    "Drafters, as the target sees them": [
        Panel("Draft call, p95", (quantiles("draftwire_draft_rpc_seconds", "drafter")[1],), unit="s"),
        Panel(
            "Failed Draft calls",
            ((rate("draftwire_draft_rpc_failures_total", "drafter, grpc_code"), "{{drafter}} {{grpc_code}}"),),
            unit="reqps",
        ),
        Panel(
            "Sessions lost and found",
            (
                (rate("draftwire_drafter_reseeds_total"), "reseeds"),
                (rate("draftwire_drafter_failovers_total"), "failovers"),
            ),
        ),
        Panel("Sessions", ((now("draftwire_drafter_sessions", "drafter"), "{{drafter}}"),)),
        Panel(
            "States",
            ((f"sum by (state) (draftwire_drafter_state{{{_TARGET}}})", "{{state}}"),),
            stacked=True,
            width=16,
        ),
    ],
    "Draft services": [
        Panel("Sessions", ((now("draftwire_sessions", "instance", _DRAFT), "{{instance}}"),)),
        Panel(
            "Memory of sessions",
            (
                (
                    f"{now('draftwire_session_bytes', 'instance', _DRAFT)} / "
                    f"{now('draftwire_session_capacity_bytes', 'instance', _DRAFT)}",
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Sessions closed",
            ((rate("draftwire_sessions_closed_total", "reason", _DRAFT), "{{reason}}"),),
            stacked=True,
        ),
        Panel("Drafts by end", ((rate("draftwire_drafts_total", "end", _DRAFT), "{{end}}"),), stacked=True),
        Panel(
            "Ids a draft",
            (
                (ratio("draftwire_draft_tokens_total", "draftwire_drafts_total", where=_DRAFT), "answered"),
                (ratio("draftwire_draft_tokens_asked_total", "draftwire_drafts_total", where=_DRAFT), "asked"),
            ),
        ),
        Panel("Prefill tokens", ((rate("draftwire_prefill_tokens_total", "source", _DRAFT), "{{source}}"),)),
        Panel("Computing, p95", (quantiles("draftwire_compute_seconds", "call", _DRAFT)[1],), unit="s"),
        Panel("Waiting to compute, p95", (quantiles("draftwire_queue_seconds", "call", _DRAFT)[1],), unit="s"),
        Panel("Jobs that wait", ((now("draftwire_compute_queue_depth", "instance", _DRAFT), "{{instance}}"),)),
        Panel(
            "Batch size, mean",
            (
                (
                    ratio("draftwire_draft_batch_size_sum", "draftwire_draft_batch_size_count", "instance", _DRAFT),
                    "{{instance}}",
                ),
            ),
            width=12,
            text="Sessions of a forward that drafts.",
        ),
        Panel(
            "Rows of forwards",
            ((rate("draftwire_draft_forward_rows_total", "kind", _DRAFT), "{{kind}}"),),
            width=12,
            text="One a position of a session; padding is computed for nobody.",
            stacked=True,
        ),
    ],
    "Caches": [
        Panel(
            "KV cache of running requests",
            (
                (now("draftwire_kv_cache_bytes"), "charged"),
                (now("draftwire_kv_cache_capacity_bytes"), "limit"),
            ),
            unit="bytes",
        ),
        Panel(
            "Prefix cache: tokens found",
            ((ratio("draftwire_prefix_cache_hits_total", "draftwire_prefix_cache_queries_total"), "share"),),
            unit="percentunit",
        ),
        Panel("Prefix cache: bytes", ((now("draftwire_prefix_cache_bytes", "tier"), "{{tier}}"),), unit="bytes"),
        Panel(
            "Drafters' prefix cache: tokens found",
            (
                (
                    ratio(
                        "draftwire_draft_prefix_cache_hits_total",
                        "draftwire_draft_prefix_cache_queries_total",
                        where=_DRAFT,
                    ),
                    "share",
                ),
            ),
            unit="percentunit",
        ),
        Panel(
            "Drafters' prefix cache: bytes",
            ((now("draftwire_draft_prefix_cache_bytes", "instance", _DRAFT), "{{instance}}"),),
            unit="bytes",
        ),
        Panel(
            "Entries evicted",
            (
                (rate("draftwire_prefix_cache_evictions_total", "tier"), "target: {{tier}}"),
                (rate("draftwire_draft_prefix_cache_evictions_total", "reason", _DRAFT), "drafters, for a {{reason}}"),
            ),
        ),
    ],
    "Calls and processes": [
        Panel(
            "Calls",
            (
                (
                    rate("grpc_server_handled_total", "grpc_method, grpc_code", 'job=~"draftwire.*"'),
                    "{{grpc_method}} {{grpc_code}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Refusals",
            (
                (
                    rate("draftwire_refusals_total", "grpc_method, reason", 'job=~"draftwire.*"'),
                    "{{grpc_method}} {{reason}}",
                ),
            ),
            unit="reqps",
        ),
        Panel(
            "Handling time, p95",
            (quantiles("grpc_server_handling_seconds", "grpc_method", 'job=~"draftwire.*"')[1],),
            unit="s",
        ),
        Panel(
            "Resident memory",
            ((now("process_resident_memory_bytes", "instance", 'job=~"draftwire.*"'), "{{instance}}"),),
            unit="bytes",
        ),
        Panel("CPU", ((rate("process_cpu_seconds_total", "instance", 'job=~"draftwire.*"'), "{{instance}}"),)),
        Panel("Open files", ((now("process_open_fds", "instance", 'job=~"draftwire.*"'), "{{instance}}"),)),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana keeps it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, wanted in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": row,
                "collapsed": False,
                "gridPos": {"h": 1, "w": _WIDTH, "x": 0, "y": y},
                "panels": [],
            }
        )
        y, x = y + 1, 0
        height = 4 if row == "Now" else 8
        for panel in wanted:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            place = {"h": height, "w": panel.width, "x": x, "y": y}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.width
        y += height
    return {
        "uid": "draftwire",
        "title": "draftwire",
        "tags": ["draftwire"],
        "schemaVersion": 39,
        "version": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "editable": True,
        "templating": {"list": [_variable("target", "draftwire-target"), _variable("drafter", "draftwire-draft")]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _variable(name: str, job: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": f'label_values(draftwire_instance_info{{job="{job}"}}, instance)', "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "sort": 1,
    }


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 15 if panel.stacked else 0, "showPoints": "never", "spanNulls": True}
        custom |= {"stacking": {"mode": "normal"}} if panel.stacked else {}
    bounds = {"min": 0, "max": 1} if panel.unit == "percentunit" else {"min": 0}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom, **bounds}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.kind != "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text(), encoding="utf-8")
