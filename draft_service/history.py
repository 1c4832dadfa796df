"""The committed ids of one session, and the one rule by which they grow."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draftwire.errors import FailedPrecondition, PositionGap


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Ids that the target says are committed, at [base_length, base_length + len(ids))."""

    base_length: int
    ids: tuple[int, ...]
    prefix_hash: int
    """CRC-32 of all ids [0, base_length + len(ids)), each as a little-endian uint32."""

    @property
    def end(self) -> int:
        """Exclusive end of the ids."""
        return self.base_length + len(self.ids)


class History:
    """Committed ids with the hash of each of their prefixes. Append-only: no call ever takes an id back."""

    def __init__(self) -> None:
        self._ids = array("I")
        # Entry n is the hash of ids[:n], so that any overlap is checked without reading it all again.
        self._hashes = array("I", [0])

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> array[int]:
        """All ids. Not a copy: to read only."""
        return self._ids

    def since(self, position: int) -> list[int]:
        """The ids [position, length)."""
        return self._ids[position:].tolist()

    def hash_at(self, length: int) -> int:
        """The prefix hash of the first `length` ids."""
        return self._hashes[length]

    def prefix(self, length: int) -> History:
        """A copy of the first `length` ids."""
        copy = History()
        copy._ids = self._ids[:length]
        copy._hashes = self._hashes[: length + 1]
        return copy

    def apply(self, advance: Advance) -> int:
        """Appends where the advance extends, checks it where it overlaps; returns the number of new ids.

        Raises PositionGap if ids are missing in between, FailedPrecondition (PREFIX_MISMATCH) if the two sides hold
        different ids. Then nothing has changed.
        """
        length = len(self)
        known = {"committed_length": str(length)}
        if advance.base_length > length:
            raise PositionGap(
                f"the ids start at {advance.base_length}, the session holds {length}: send from there", metadata=known
            )
        overlap = min(advance.end, length) - advance.base_length
        new = advance.ids[overlap:]
        hashes = _hashes(new, self._hashes[min(advance.end, length)])
        agrees = self._ids[advance.base_length : advance.base_length + overlap] == array("I", advance.ids[:overlap])
        if not agrees or hashes[-1] != advance.prefix_hash:
            raise FailedPrecondition(
                f"the first {advance.end} ids differ from those of the session: open it again with Prefill",
                reason="PREFIX_MISMATCH",
                metadata=known,
            )
        self._ids.extend(new)
        self._hashes.extend(hashes[1:])
        return len(new)


def _hashes(ids: Sequence[int], start: int) -> array[int]:
    """`start`, then the hash after each id."""
    hashes = array("I", [start])
    for token_id in ids:
        start = zlib.crc32(token_id.to_bytes(4, "little"), start)
        hashes.append(start)
    return hashes
