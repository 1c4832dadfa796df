"""`draftwire top`: rates between looks, the page, and the command against a server that plays scripts."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from client.app import build_app
from client.looks import Look, Looks, Rates, by_position, rates_between
from client.top_view import bar, duration, page, positions, size
from draftwire import parse
from draftwire.errors import DeadlineExceeded
from draftwire.events import RequestState
from draftwire.scripted_target import ScriptedTarget, serve
from draftwire.v1 import target_pb2 as pb
from draftwire.wire import to_duration

INFO = pb.GetModelInfoResponse(
    instance_id="i1",
    model_id="tiny",
    max_running=8,
    running=2,
    max_queued=64,
    queued=1,
    kv_bytes=512 * 1024**2,
    kv_bytes_limit=1024**3,
)
DRAFTERS = pb.ListDraftersResponse(
    drafters=[
        pb.Drafter(address="10.0.0.1:50052", state=pb.DRAFTER_STATE_READY, source_kind="lookup", sessions=2,
                   rpc_p50=to_duration(0.0013), draft_acceptance_rate=0.5),
        pb.Drafter(address="10.0.0.2:50052", state=pb.DRAFTER_STATE_REFUSED, refused_reason="tokenizer differs"),
    ]
)  # fmt: skip


def activity(uptime_s: float, factor: int, **more: Any) -> pb.ListRequestsResponse:
    """What a target with two requests says after it has done `factor` times some work."""
    totals = pb.ServiceTotals(
        uptime=to_duration(uptime_s),
        requests_finished=3 * factor,
        prompt_tokens=50 * factor,
        completion_tokens=100 * factor,
        rounds=50 * factor,
        num_spec_steps=20 * factor,
        num_draft_tokens=60 * factor,
        num_accepted_draft_tokens=30 * factor,
        drafted_by_position=[20 * factor, 20 * factor, 20 * factor],
        accepted_by_position=[18 * factor, 10 * factor, 2 * factor],
        rounds_without_draft={"not_worth_it": 25 * factor, "late": 5 * factor},
    )
    requests = [
        pb.RequestInfo(request_id="first", state=pb.REQUEST_STATE_DECODING, age=to_duration(65), prompt_tokens=7,
                       prefilled_tokens=6, completion_tokens=40, max_tokens=64, decode_tokens_per_second=21.5,
                       num_draft_tokens=8, num_accepted_draft_tokens=6, drafter_id="10.0.0.1:50052"),
        pb.RequestInfo(request_id="\x1b[2Jsecond", state=pb.REQUEST_STATE_PREFILLING, age=to_duration(0.4),
                       prompt_tokens=4000, prefilled_tokens=256, max_tokens=512),
        pb.RequestInfo(request_id="third", state=pb.REQUEST_STATE_QUEUED, age=to_duration(2), prompt_tokens=9,
                       max_tokens=12),
    ]  # fmt: skip
    return pb.ListRequestsResponse(totals=totals, requests=more.get("requests", requests))


def look(reply: pb.ListRequestsResponse) -> Look:
    return Look(
        unix_s=1e9, model=parse.model_info(INFO), drafters=parse.drafters(DRAFTERS), activity=parse.activity(reply)
    )


def looks(*replies: pb.ListRequestsResponse) -> Looks:
    made = Looks()
    for reply in replies:
        made.add(look(reply))
    return made


def drawn(shown: Any, width: int = 110) -> str:
    """What a terminal without colours gets."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, record=True)
    console.print(shown)
    return console.export_text()


def target(*activities: Any) -> ScriptedTarget:
    """The last activity for ever."""
    replies = {"GetModelInfo": INFO, "ListDrafters": DRAFTERS, "ListRequests": [*activities, *[activities[-1]] * 500]}
    return ScriptedTarget([], replies=replies)


def run(scripted: ScriptedTarget, *arguments: str) -> Result:
    with serve(scripted) as address:
        return CliRunner().invoke(
            build_app(), ["top", *arguments], env={"DRAFTWIRE_ADDRESS": address, "COLUMNS": "110"}
        )


def test_rates_are_those_between_the_two_looks() -> None:
    """On the server's clock, so that a slow answer does not change them."""
    rates = looks(activity(10.0, 1), activity(14.0, 3)).rates
    assert rates == Rates(
        seconds=4.0,
        completion_tokens_per_second=50.0,
        prompt_tokens_per_second=25.0,
        requests_per_second=1.5,
        draft_acceptance_rate=0.5,
        mean_acceptance_length=1 + 60 / 40,
        tokens_per_round=2.0,
        acceptance_by_position=(0.9, 0.5, 0.1),
    )


def test_one_look_or_nothing_new_gives_zeros() -> None:
    """No NaN and no division by zero."""
    one = activity(10.0, 1)
    assert looks(one).rates == Rates(seconds=0.0)
    quiet = looks(one, activity(11.0, 1)).rates
    assert quiet == Rates(seconds=1.0)


def test_a_restarted_target_begins_anew() -> None:
    """Counters that fall back to zero are no negative rates."""
    made = looks(activity(100.0, 9))
    fresh = look(activity(1.0, 1))
    made.add(replace(fresh, model=replace(fresh.model, instance_id="i2")))
    assert made.rates == Rates(seconds=0.0)
    assert made.last.model.instance_id == "i2"


def test_rates_reach_back_over_the_kept_looks_only() -> None:
    made = Looks(keep=2)
    for uptime_s, factor in ((0.0, 0), (1.0, 9), (2.0, 10)):
        made.add(look(activity(uptime_s, factor)))
    assert made.rates.completion_tokens_per_second == 100.0


@pytest.mark.parametrize(
    ("drafted", "accepted", "shares"),
    [((4, 4), (4, 1), (1.0, 0.25)), ((4, 0), (2, 0), (0.5,)), ((0, 2), (0, 1), (0.0, 0.5)), ((), (), ())],
)
def test_shares_by_position(drafted: Sequence[int], accepted: Sequence[int], shares: Sequence[float]) -> None:
    """Positions behind the last draft are not there; one without drafts in between is 0."""
    assert by_position(drafted, accepted) == shares


def test_positions_that_came_later_count_from_zero() -> None:
    """A longer window has positions that the look before did not have."""
    before = parse.activity(activity(0.0, 0, requests=[])).totals
    before = replace(before, drafted_by_position=(), accepted_by_position=())
    after = parse.activity(activity(1.0, 1)).totals
    assert rates_between(before, after).acceptance_by_position == (0.9, 0.5, 0.1)


@pytest.mark.parametrize(
    ("share", "drawing"),
    [(0.0, "    "), (0.5, "██  "), (1.0, "████"), (0.03, "▏   "), (0.6, "██▍ "), (7.0, "████"), (-1.0, "    ")],
)
def test_bars_are_as_fine_as_an_eighth_of_a_cell(share: float, drawing: str) -> None:
    assert bar(share, cells=4) == drawing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4s"), (59.9, "59s"), (125, "2m05s"), (3 * 3600 + 7 * 60, "3h07m"), (98 * 3600, "4d02h")],
)
def test_durations_stay_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 * 1024**3, "3.0 GiB")])
def test_sizes_have_binary_units(count: int, text: str) -> None:
    assert size(count) == text


def test_the_page_has_everything_that_was_asked_for() -> None:
    """Speed, places, queue, KV, acceptance by position as bars, each request, each drafter with its reason."""
    shown = drawn(page(looks(activity(10.0, 1), activity(14.0, 3)), "127.0.0.1:50051"))
    for part in (
        "tiny at 127.0.0.1:50051, up 14s, 9 done, 0 failed",
        "50.0 tok/s (prompts 25.0)",
        "running 2/8",
        "waiting 1/64",
        "KV ████     512.0 MiB of 1.0 GiB",
        "50% accepted, 2.50 tokens a speculative round, 2.00 a round",
        " 1 ███████▎  90%",
        " 2 ████      50%",
        " 3 ▊         10%",
        "256/4000",
        "1.3 ms",
        "tokenizer differs",
    ):
        assert part in shown, shown
    row = next(line for line in shown.splitlines() if "first" in line)
    for cell in ("decoding", "1m05s", "40/64", "21.5", "75%", "10.0.0.1:50052"):
        assert cell in row


def test_names_cannot_steer_the_terminal() -> None:
    """What callers and drafters name themselves is shown, not obeyed: neither escapes nor markup."""
    reply = activity(10.0, 1, requests=[pb.RequestInfo(request_id="\x1b[2J[red]x[/]", state=pb.REQUEST_STATE_DECODING)])
    shown = drawn(page(looks(reply), "a:1"))
    assert "\x1b[2J" not in shown
    assert "\ufffd[2J[red]x[/]" in shown


def test_a_narrow_terminal_gets_every_line() -> None:
    """Nothing is lost at 40 columns; no line is longer."""
    shown = drawn(page(looks(activity(10.0, 1), activity(14.0, 3)), "127.0.0.1:50051"), width=40)
    assert max(map(len, shown.splitlines())) <= 40
    assert "50.0 tok/s" in shown


def test_more_requests_than_fit_are_counted() -> None:
    many = [pb.RequestInfo(request_id=f"r{i}", state=pb.REQUEST_STATE_QUEUED) for i in range(30)]
    shown = drawn(page(looks(activity(1.0, 1, requests=many)), "a:1", most_requests=4))
    assert "and 26 more" in shown
    assert "r3" in shown
    assert "r4" not in shown


def test_an_idle_target_says_so() -> None:
    """No request, no draft, no drafter: words instead of empty tables, with why there were no drafts."""
    quiet = pb.ListRequestsResponse(totals=pb.ServiceTotals(rounds_without_draft={"no_drafter": 7}))
    made = Looks()
    made.add(replace(look(quiet), drafters=()))
    shown = drawn(page(made, "a:1"))
    assert "no request runs" in shown
    assert "drafts: none so far (no drafter 7)" in shown
    assert "no drafter is configured" in shown
    assert "nothing was drafted" in shown


def test_without_drafts_lately_positions_are_those_since_the_start() -> None:
    shown = drawn(page(looks(activity(10.0, 1), activity(11.0, 1)), "a:1"))
    assert "none lately; 50% accepted since the start" in shown
    assert " 1 ███████▎  90%" in shown


def test_good_fair_and_poor_positions_have_colours() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    console.print(positions((0.9, 0.5, 0.1)))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert [text.index(f"\x1b[{colour}m") for colour in (32, 33, 31)] == sorted(
        text.index(f"\x1b[{colour}m") for colour in (32, 33, 31)
    )


def test_once_prints_one_page_without_colours_into_a_pipe() -> None:
    result = run(target(activity(10.0, 1), activity(12.0, 2)), "--once", "--interval", "0.05")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("tiny at") == 1
    assert "50.0 tok/s" in result.stdout
    assert "\x1b" not in result.stdout


def test_json_is_one_object_for_scripts() -> None:
    """Rates, requests, drafters, totals; nothing but JSON on stdout."""
    result = run(target(activity(10.0, 1), activity(12.0, 2)), "--once", "--json", "--interval", "0.05")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["rates"]["completion_tokens_per_second"] == 50.0
    assert [one["state"] for one in shown["requests"]] == ["decoding", "prefilling", "queued"]
    assert shown["drafters"][1]["refused_reason"] == "tokenizer differs"
    assert shown["totals"]["completion_tokens"] == 200
    assert shown["model"]["kv_bytes_limit"] == 1024**3


def test_a_target_that_is_not_there_is_exit_code_3() -> None:
    result = CliRunner().invoke(build_app(), ["top", "--once", "--address", "127.0.0.1:1", "--timeout", "1"])
    assert result.exit_code == 3
    assert "is it running?" in result.stderr


def test_a_state_of_a_newer_server_is_unknown() -> None:
    reply = pb.ListRequestsResponse(requests=[pb.RequestInfo(request_id="r", state=99)])  # type: ignore[arg-type]
    assert parse.activity(reply).requests[0].state is RequestState.UNKNOWN


def read_until(terminal: int, wanted: str) -> str:
    """What a terminal gets, up to something. Raises AssertionError with it where that never comes."""
    seen = ""
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], 60)
        try:
            more = os.read(terminal, 65536) if ready else b""
        except OSError:  # the program has gone
            more = b""
        assert more, seen[-2000:]
        seen += more.decode(errors="replace")
    return seen


def test_a_terminal_gets_a_live_page_until_ctrl_c() -> None:
    """The alternate screen, redrawn; a fault in between is shown and waited out; Ctrl-C ends with 0."""
    scripted = target(activity(10.0, 1), DeadlineExceeded("too slow"), activity(12.0, 2))
    with serve(scripted) as address:
        parent, child = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "110", "LINES": "60"}
        argv = [sys.executable, "-m", "client", "top", "--address", address, "--interval", "0.1"]
        process = subprocess.Popen(argv, stdin=child, stdout=child, stderr=subprocess.PIPE, env=environment)
        # So that reading ends with the program, whatever it does.
        os.close(child)
        try:
            seen = read_until(parent, "50.0 tok/s")
            process.send_signal(signal.SIGINT)
            seen += read_until(parent, "\x1b[?1049l")
            assert process.wait(30) == 0
        finally:
            process.kill()
            _, errors = process.communicate()
            os.close(parent)
    assert b"Traceback" not in errors
    assert seen.index("\x1b[?1049h") < seen.index("no answer: too slow") < seen.index("50.0 tok/s")


def test_pages_follow_each_other_in_a_pipe_until_the_reader_leaves() -> None:
    """As `draftwire top | head`: no traceback when the pipe closes."""
    with serve(target(activity(10.0, 1), activity(12.0, 2))) as address:
        argv = [sys.executable, "-m", "client", "top", "--address", address, "--interval", "0.05", "--json"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(2)]
            process.stdout.close()
            assert process.stderr is not None
            errors = process.stderr.read()
            process.wait(30)
    assert len(lines) == 2
    assert "Traceback" not in errors
