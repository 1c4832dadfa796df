"""The page of `draftwire top`: made of rich renderables, so that it fits any width and a pipe as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from client.looks import Look, Looks, Rates, by_position
from client.render import harmless
from draftwire.events import Drafter, DrafterState, RequestInfo, RequestState, ServiceTotals

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GOOD, _POOR = 0.6, 0.3
_DRAFTER_STYLES = {DrafterState.READY: "green", DrafterState.REFUSED: "red", DrafterState.OPEN_BREAKER: "yellow"}
_REQUEST_STYLES = {RequestState.DECODING: "green", RequestState.QUEUED: "yellow", RequestState.STALLED: "red"}


def page(looks: Looks, address: str, *, most_requests: int = 20, fault: str | None = None) -> RenderableType:
    """One page. fault: why there was no newer look."""
    look, rates = looks.last, looks.rates
    parts: list[RenderableType] = [_head(look, address)]
    if fault is not None:
        parts.append(Text(f"no answer: {harmless(fault)}; this is the last one", style="bold red"))
    parts += [
        _work(look, rates),
        _drafts(rates, look.activity.totals),
        positions(rates.acceptance_by_position or _since_start(look.activity.totals)),
        _requests(look.activity.requests, most_requests),
        _drafters(look.drafters),
    ]
    return Group(*parts)


def bar(share: float, cells: int = 8) -> str:
    """A bar of so many cells, as fine as an eighth of one. share: 0 to 1, cut to that."""
    eighths = round(min(1.0, max(0.0, share)) * cells * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(cells)


def positions(shares: Sequence[float]) -> RenderableType:
    """Acceptance by position in the window, a small bar each."""
    if not shares:
        return Text("acceptance by position: nothing was drafted", style="dim")
    cells = []
    for position, share in enumerate(shares, 1):
        style = "green" if share >= _GOOD else "yellow" if share >= _POOR else "red"
        cells.append(Text.assemble(f"{position:>2} ", (bar(share), style), f"{share:>5.0%}"))
    return Group(Text("acceptance by position", style="dim"), Columns(cells, padding=(0, 2)))


def duration(seconds: float) -> str:
    """A time span in at most seven characters: 0.4s, 59s, 2m05s, 3h07m, 4d02h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole}s"
    if not hours:
        return f"{minutes}m{whole % 60:02}s"
    return f"{hours}h{minutes % 60:02}m" if not days else f"{days}d{hours % 24:02}h"


def size(count: int) -> str:
    """Bytes in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _head(look: Look, address: str) -> Text:
    totals = look.activity.totals
    return Text.assemble(
        (harmless(look.model.model_id), "bold"),
        f" at {harmless(address)}, up {duration(totals.uptime_s)}, ",
        f"{totals.requests_finished} done, {totals.requests_failed} failed",
    )


def _work(look: Look, rates: Rates) -> Text:
    model = look.model
    text = Text.assemble(
        (f"{rates.completion_tokens_per_second:.1f} tok/s", "bold"),
        f" (prompts {rates.prompt_tokens_per_second:.1f})",
        f"   running {model.running}/{model.max_running}",
        f"   waiting {model.queued}/{model.max_queued}",
    )
    if model.kv_bytes_limit:
        share = model.kv_bytes / model.kv_bytes_limit
        style = "red" if share > 0.9 else "cyan"
        text.append_text(
            Text.assemble("   KV ", (bar(share), style), f" {size(model.kv_bytes)} of {size(model.kv_bytes_limit)}")
        )
    return text


def _drafts(rates: Rates, totals: ServiceTotals) -> Text:
    if rates.mean_acceptance_length:
        return Text(
            f"drafts: {rates.draft_acceptance_rate:.0%} accepted, "
            f"{rates.mean_acceptance_length:.2f} tokens a speculative round, {rates.tokens_per_round:.2f} a round"
        )
    if not totals.num_draft_tokens:
        why = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in _most(totals.rounds_without_draft))
        return Text(f"drafts: none so far{f' ({why})' if why else ''}", style="dim")
    share = totals.num_accepted_draft_tokens / totals.num_draft_tokens
    return Text(f"drafts: none lately; {share:.0%} accepted since the start", style="dim")


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:3]


def _since_start(totals: ServiceTotals) -> tuple[float, ...]:
    return by_position(totals.drafted_by_position, totals.accepted_by_position)


def _requests(requests: Sequence[RequestInfo], most: int) -> RenderableType:
    if not requests:
        return Text("no request runs", style="dim")
    table = Table("request", "state", "age", "prompt", "made", "tok/s", "accepted", "drafter", expand=True)
    for column in table.columns[2:7]:
        column.justify = "right"
    table.columns[0].no_wrap = table.columns[7].no_wrap = True
    for one in requests[:most]:
        reading = one.state is RequestState.PREFILLING
        table.add_row(
            Text(harmless(one.request_id), overflow="ellipsis"),
            Text(one.state.value, style=_REQUEST_STYLES.get(one.state, "")),
            duration(one.age_s),
            f"{one.prefilled_tokens}/{one.prompt_tokens}" if reading else str(one.prompt_tokens),
            f"{one.completion_tokens}/{one.max_tokens}",
            f"{one.decode_tokens_per_second:.1f}" if one.completion_tokens else "",
            f"{one.draft_acceptance_rate:.0%}" if one.num_draft_tokens else "",
            Text(harmless(one.drafter_id), overflow="ellipsis"),
        )
    if len(requests) > most:
        table.caption = f"and {len(requests) - most} more"
    return table


def _drafters(drafters: Sequence[Drafter]) -> RenderableType:
    if not drafters:
        return Text("no drafter is configured", style="dim")
    table = Table("drafter", "state", "drafts with", "sessions", "RPC p50", "accepted", "why", expand=True)
    for column in table.columns[3:6]:
        column.justify = "right"
    for one in drafters:
        kind = " ".join(filter(None, (one.source_kind, one.model_id)))
        table.add_row(
            Text(harmless(one.address)),
            Text(one.state.value, style=_DRAFTER_STYLES.get(one.state, "")),
            Text(harmless(kind)),
            str(one.sessions),
            "" if one.rpc_p50_s is None else f"{one.rpc_p50_s * 1e3:.1f} ms",
            f"{one.draft_acceptance_rate:.0%}",
            Text(harmless(one.refused_reason)),
        )
    return table
