"""The exact bytes that one token contributes to the text.

Two kinds of decoder cover the models of our field. Byte-level BPE (GPT-2 and later): each character of a
token stands for one byte. Sentencepiece style: U+2581 stands for a space, and `<0xNN>` is a byte if the
decoder has a byte fallback. Which one is read from the tokenizer's own JSON, not guessed from a class name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_SPACE_MARK: Final = "\u2581"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 is itself, the rest is moved to U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRules:
    """How a decoder turns token strings into bytes."""

    byte_level: bool
    byte_fallback: bool
    replacements: tuple[tuple[str, str], ...]
    """(pattern, content) pairs, applied in order; empty for byte-level."""
    strips_leading_space: bool
    """The decoder drops one space at the start of a whole sequence; single pieces keep it."""

    def encode(self, token: str, alphabet: Mapping[str, int]) -> bytes:
        """The bytes of one vocabulary entry. Added tokens follow the same rules, as in the decoder."""
        if self.byte_level:
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            # Only added tokens have characters outside of the alphabet; they stand for themselves.
            return token.encode("utf-8", errors="replace")
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode("utf-8", errors="replace")


def piece_rules(decoder: Mapping[str, Any] | None) -> PieceRules | None:
    """The rules of the "decoder" entry of a tokenizer.json, or None for a decoder of another kind."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return PieceRules(byte_level=True, byte_fallback=False, replacements=(), strips_leading_space=False)
    replacements = []
    strips = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                strips = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " "}:
                strips = step.get("start", 0) > 0
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                return None
    if _SPACE_MARK not in (pattern for pattern, _ in replacements):
        return None
    return PieceRules(
        byte_level=False,
        byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        strips_leading_space=strips,
    )


def _steps(decoder: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if decoder is None:
        return ()
    return decoder["decoders"] if decoder.get("type") == "Sequence" else (decoder,)
