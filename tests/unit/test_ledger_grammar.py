"""The books under a constraint: where it ends, whether what was delivered satisfies it, and that drafts change neither."""

from __future__ import annotations

import re
from itertools import product

import pytest

from target_service.accept import Verdict
from target_service.ledger import FinishReason, Ledger
from target_service.params import Stopping

END = 0


class Digits:
    """[0-9]+x? as a constraint: complete after a digit, at its end after the x."""

    def __init__(self) -> None:
        self.text = ""

    @property
    def ended(self) -> bool:
        return self.text.endswith("x")

    @property
    def complete(self) -> bool:
        return self.completes(self.text)

    def completes(self, text: str) -> bool:
        return re.fullmatch("[0-9]+x?", text) is not None

    def advance(self, token_id: int) -> None:
        assert not self.ended
        self.text += chr(token_id)


def book(text: str, sizes: tuple[int, ...], *, end: bool = False, **options: object) -> tuple[object, ...]:
    """Commits the text in rounds of these sizes; what the user sees of the end."""
    ids = [ord(char) for char in text] + [END] * end
    chosen: dict[str, object] = {"max_tokens": 10, "end_ids": frozenset({END}), **options}
    ledger = Ledger([1], Stopping(**chosen), lambda token: bytes([token]), Digits())  # type: ignore[arg-type]
    seen, cut = "", 0
    for size in sizes:
        now, ids = ids[:size], ids[size:]
        if not now:
            break
        committed = ledger.commit(Verdict(tuple(now), size - 1), None)
        seen += committed.released.text if committed.released else ""
        cut += committed.cut
        if committed.finish is not None:
            finish = committed.finish
            return seen, finish.reason, finish.stop, ledger.grammar_complete, ledger.completion_tokens
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("12x", {}, ("12x", FinishReason.GRAMMAR_END, None, True, 3)),
        # The end of the grammar is the reason also where the budget is used up with it, and before min_tokens.
        ("12x", {"max_tokens": 3, "min_tokens": 3}, ("12x", FinishReason.GRAMMAR_END, None, True, 3)),
        ("123", {"max_tokens": 3}, ("123", FinishReason.MAX_TOKENS, None, True, 3)),
        ("12", {"end": True}, ("12", FinishReason.EOS, None, True, 3)),
        ("1234", {"stops": ("3",)}, ("12", FinishReason.STOP_STRING, "3", True, 3)),
        ("12x", {"stops": ("2x",)}, ("1", FinishReason.STOP_STRING, "2x", True, 3)),
        ("12x", {"stops": ("12",)}, ("", FinishReason.STOP_STRING, "12", False, 2)),
        ("12x", {"stops": ("x",), "include_stop": True}, ("12x", FinishReason.STOP_STRING, "x", True, 3)),
        ("12x", {"stops": ("2xy",)}, ("12x", FinishReason.GRAMMAR_END, None, True, 3)),
        ("15", {"stop_ids": frozenset({ord("5")})}, ("1", FinishReason.STOP_TOKEN, None, True, 2)),
        ("5", {"stop_ids": frozenset({ord("5")})}, ("", FinishReason.STOP_TOKEN, None, False, 1)),
    ],
)
def test_every_partition_into_rounds_ends_alike(
    text: str, options: dict[str, object], expected: tuple[object, ...]
) -> None:
    """Whatever burst brings the end, with drafts behind it or not."""
    end = bool(options.pop("end", False)) if "end" in options else False
    for sizes in product((1, 2, 3, 4), repeat=4):
        found = book(text, sizes, end=end, **options)
        if expected[1] is FinishReason.STOP_STRING:
            found, wanted = found[:4], expected[:4]
        else:
            wanted = expected
        assert found == wanted, sizes


def test_without_a_constraint_nothing_is_said() -> None:
    ledger = Ledger([1], Stopping(max_tokens=1), lambda token: bytes([token]))
    ledger.commit(Verdict((65,), 0), None)
    assert ledger.grammar_complete is None
