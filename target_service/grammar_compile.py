"""Compiles constraints with xgrammar, and tries what came out. Runs in the compiler's process; the target only matches.

xgrammar is imported here and in `grammars` alone, by name: its types would draw all of torch into the type check.
"""

from __future__ import annotations

import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from target_service.grammar_rules import Refused, checked_schema, checked_tag, choice_grammar

_CLOCK: Final = re.compile(r"\[\d\d:\d\d:\d\d\] ")
_SOURCE: Final = re.compile(r"\S+\.(?:cc|h|cpp):\d+: ")
_CHECK: Final = re.compile(r"^Check failed: \(.*?\) is \w+: ")
_TRIED_TOKENS: Final = 64
_MOST_TRIED_S: Final = 0.25


def tokenizer_info(pieces: Sequence[bytes], width: int, end_ids: Sequence[int]) -> Any:
    """xgrammar's view of a vocabulary.

    pieces: the bytes of ids [0, len(pieces)), empty for special tokens, which no grammar but an end id lets through.
    width: logits a row has; ids from len(pieces) on have no text and are never allowed.
    """
    xgrammar = import_module("xgrammar")
    kinds = xgrammar.VocabType
    return xgrammar.TokenizerInfo(list(pieces), kinds.RAW, vocab_size=width, stop_token_ids=sorted(end_ids))


class Compiler:
    """Compiles for one vocabulary."""

    def __init__(self, info: Any) -> None:
        """info: from `tokenizer_info`."""
        self._xgrammar = import_module("xgrammar")
        self._info = info
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, kind: str, text: str, values: Sequence[str], any_whitespace: bool) -> str:
        """The compiled grammar as JSON. Raises Refused, with what is wrong with the constraint.

        What the compiler warns of, it ignores: that is refused as well.
        """
        with _captured_warnings() as warnings:
            try:
                compiled = self._compiled(kind, text, values, any_whitespace)
            except (RuntimeError, ValueError, TypeError) as error:
                if isinstance(error, Refused):
                    raise
                raise Refused(cleaned(str(error))) from None
        if warnings:
            raise Refused(cleaned(warnings[0]))
        self._try(compiled)
        return str(compiled.serialize_json())

    def _compiled(self, kind: str, text: str, values: Sequence[str], any_whitespace: bool) -> Any:
        compiler = self._compiler
        if kind == "json_schema":
            checked_schema(text)
            return compiler.compile_json_schema(text, any_whitespace=any_whitespace, strict_mode=True)
        if kind == "json_object":
            whole = '{"type":"object"}'
            return compiler.compile_json_schema(whole, any_whitespace=any_whitespace, strict_mode=False)
        if kind == "regex":
            return compiler.compile_regex(text)
        if kind == "ebnf":
            return compiler.compile_grammar(text)
        if kind == "choice":
            return compiler.compile_grammar(choice_grammar(values))
        checked_tag(text)
        return compiler.compile_structural_tag(text)

    def _try(self, compiled: Any) -> None:
        """Walks a little way: a grammar without any text is refused, and one that is slow to follow.

        An ambiguous grammar compiles at once and then takes longer with each token, which would be the target's time.
        """
        dice = random.Random(0)
        # The thread's own time: a busy machine makes no grammar slow.
        began_s = time.thread_time()
        for stubborn in (False, True):
            matcher = self._xgrammar.GrammarMatcher(compiled)
            last: int | None = None
            for step in range(_TRIED_TOKENS):
                allowed = self._allowed(matcher)
                if step == 0 and not allowed.size:
                    only_end = matcher.is_completed()
                    raise Refused("allows nothing but the empty text" if only_end else "allows no text at all")
                if not allowed.size:
                    break
                if not stubborn or last is None or last not in allowed:
                    last = int(allowed[dice.randrange(allowed.size)])
                matcher.accept_token(last)
                if time.thread_time() - began_s > _MOST_TRIED_S:
                    raise Refused("is so ambiguous that following it takes too long; simplify its repetitions")

    def _allowed(self, matcher: Any) -> NDArray[np.int64]:
        """The ids that may come next, end ids left out."""
        words = np.zeros((1, -(-self._info.vocab_size // 32)), np.int32)
        matcher.fill_next_token_bitmask(words, 0)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self._info.vocab_size]
        bits[list(matcher.stop_token_ids)] = 0
        return np.flatnonzero(bits)


def cleaned(message: str) -> str:
    """A compiler's message without clock, source file and inner check."""
    text = _SOURCE.sub("", _CLOCK.sub("", message)).strip().removeprefix("Warning: ")
    return _CHECK.sub("", text).strip() or "the compiler gave no reason"


@contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Collects what C++ writes to standard error, one entry a line."""
    found: list[str] = []
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            found.extend(line for line in file.read().decode(errors="replace").splitlines() if "Warning: " in line)
