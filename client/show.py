"""`draftwire info`, `drafters`, `tokenize`: what a target service says about itself."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from client.console import stdout
from client.options import Connection
from draftwire.events import Drafter, DrafterState, ModelInfo

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
_STYLES = {DrafterState.READY: "green", DrafterState.REFUSED: "red", DrafterState.OPEN_BREAKER: "yellow"}


def info(connection: Connection, as_json: Json = False) -> None:
    """Shows what is served and within which limits."""
    with connection.client() as client:
        found = client.model_info()
    if as_json:
        print(json.dumps(asdict(found) | {"capabilities": sorted(found.capabilities)}))
    else:
        stdout().print(info_table(found))


def drafters(connection: Connection, as_json: Json = False) -> None:
    """Shows the drafters as the target service sees them."""
    with connection.client() as client:
        found = client.drafters()
    if as_json:
        print(json.dumps([asdict(drafter) for drafter in found]))
    else:
        stdout().print(drafter_table(found) if found else "no drafter is configured")


def tokenize(
    connection: Connection,
    text: Annotated[str | None, typer.Argument(help="The text; from standard input when absent or '-'.")] = None,
    chat: Annotated[bool, typer.Option(help="As a user's turn of a chat.")] = False,
    pieces: Annotated[bool, typer.Option("--pieces", help="One id a line, with its text.")] = False,
) -> None:
    """Turns a text into token ids."""
    given = sys.stdin.read() if text is None or text == "-" else text
    with connection.client() as client:
        ids = client.tokenize(messages=[{"role": "user", "content": given}]) if chat else client.tokenize(given)
        if not pieces:
            print(" ".join(map(str, ids)))
            return
        for token_id in ids:
            print(f"{token_id}\t{client.detokenize([token_id], skip_special_tokens=False)!r}")


def info_table(found: ModelInfo) -> Table:
    """What a target says of itself."""
    sampling = {name: value for name, value in asdict(found.default_sampling).items() if value not in (None, {})}
    table = Table("field", "value", title=found.model_id)
    for name, value in (
        ("revision", found.model_revision or "unknown"),
        ("context length", f"{found.context_length} tokens"),
        ("tokenizer", f"{found.tokenizer_size} ids, {found.tokenizer_fingerprint[:12]}"),
        ("end tokens", ", ".join(map(str, found.end_token_ids))),
        ("weights", f"{found.dtype} on {found.device}"),
        ("numerics", _numerics(found)),
        ("batching", found.batching or "unknown"),
        ("prefix cache", _held(found.prompt_cache_bytes, found.prompt_cache_bytes_limit)),
        ("drafts", found.no_drafting_reason or f"possible ({found.rollback})"),
        ("default sampling", ", ".join(f"{name} {value}" for name, value in sampling.items()) or "greedy"),
        ("default max_tokens", str(found.default_max_tokens)),
        ("abilities", ", ".join(sorted(found.capabilities))),
        ("requests", f"{found.running} of {found.max_running} running, {found.queued} of {found.max_queued} waiting"),
        ("software", f"{found.software_version}, instance {found.instance_id[:12]}"),
    ):
        table.add_row(name, value)
    return table


def _numerics(found: ModelInfo) -> str:
    if found.exact_rows:
        return f"{found.numerics}: every decode forward has {found.exact_rows} rows"
    ties = f": logits closer than {found.near_tie_gap:g} count as near ties" if found.near_tie_gap else ""
    return f"{found.numerics}{ties}"


def _held(taken: int, limit: int) -> str:
    return f"{taken >> 20} of {limit >> 20} MiB" if limit else "off"


def drafter_table(found: tuple[Drafter, ...]) -> Table:
    """The drafters, one a line."""
    table = Table("address", "state", "drafts with", "sessions", "RPC p50", "accepted", "why")
    for drafter in found:
        style = _STYLES.get(drafter.state, "")
        table.add_row(
            drafter.address,
            f"[{style}]{drafter.state.value}[/]" if style else drafter.state.value,
            " ".join(filter(None, (drafter.source_kind, drafter.model_id))),
            str(drafter.sessions),
            "" if drafter.rpc_p50_s is None else f"{drafter.rpc_p50_s * 1e3:.1f} ms",
            f"{drafter.draft_acceptance_rate:.0%}",
            drafter.refused_reason,
        )
    return table
