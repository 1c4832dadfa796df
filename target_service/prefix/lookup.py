"""Which stored blocks and state a prompt begins with. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from target_service.prefix.keys import BLOCK, block_key, state_key
from target_service.prefix.memory import Memory, State

_MOST_ENDS = 16
"""Blocks, from the last that agrees backwards, behind which ends of texts are looked for on disk: each takes 32 digests."""
_MOST_SEARCHED = 256
"""Blocks behind the place where a text leaves the stored ones that are searched for a state that reaches back to it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A block whose first `count` ids, from position `begin`, are those of the prompt."""

    key: bytes
    begin: int
    count: int
    whole: bool
    """Whether that is all of it."""

    @property
    def end(self) -> int:
        """The position after the last that agrees."""
        return self.begin + self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What can be reused."""

    length: int
    steps: tuple[Step, ...]
    """Cover [0, length)."""
    state: bytes | None
    """Key of the state to start from, where the model has one."""
    state_path: tuple[bytes, ...] = ()
    """Blocks beside or behind the steps at whose end it stands."""
    agreed: int = 0
    """Positions that agree with stored ids; more than `length` where a state is missing there."""


def find(
    memory: Memory,
    on_disk: Collection[bytes],
    root: bytes,
    ids: Sequence[int],
    *,
    limit: int,
    stateful: bool,
    multiple: int = 1,
) -> Found:
    """The longest prefix of ids that is stored and can be used.

    limit: most positions that may be reused. multiple: reuse ends at a multiple of it.
    """
    steps = _walk(memory, on_disk, root, ids, limit)
    agreed = min(limit, steps[-1].end) if steps else 0
    agreed -= agreed % multiple
    if not stateful:
        return Found(length=agreed, steps=_until(steps, agreed), state=None, agreed=agreed)
    length, state, path = _best_state(memory, on_disk, root, steps, ids[:agreed])
    return Found(length=length, steps=_until(steps, length), state=state, state_path=path, agreed=agreed)


def missing(memory: Memory, root: bytes, ids: Sequence[int], *, stateful: bool) -> int:
    """From which position on the rows of ids are not in memory. len(ids) where all are."""
    key, at = root, 0
    while at + BLOCK <= len(ids):
        child = block_key(key, ids[at : at + BLOCK])
        if child not in memory:
            return at
        key, at = child, at + BLOCK
    rest = tuple(ids[at:])
    if not rest or block_key(key, rest) in memory:
        return len(ids)
    # Any prefix of rows serves; a state needs a block that ends where it stands.
    if not stateful and any(block.ids[: len(rest)] == rest for block in memory.after(key)):
        return len(ids)
    return at


def _walk(memory: Memory, on_disk: Collection[bytes], root: bytes, ids: Sequence[int], limit: int) -> list[Step]:
    steps: list[Step] = []
    key, at = root, 0
    while at < limit and at + BLOCK <= len(ids):
        child = block_key(key, ids[at : at + BLOCK])
        if child not in memory and child not in on_disk:
            break
        steps.append(Step(child, at, BLOCK, True))
        key, at = child, at + BLOCK
    rest = tuple(ids[at : at + BLOCK])
    if at < limit and rest:
        part = _part(memory, on_disk, key, at, rest)
        if part is not None:
            steps.append(part)
    return steps


def _part(memory: Memory, on_disk: Collection[bytes], parent: bytes, at: int, rest: tuple[int, ...]) -> Step | None:
    """The block after `parent` that agrees longest with `rest`. On disk only whole ones can be told by their name."""
    best: Step | None = None
    for block in memory.after(parent):
        count = _common(block.ids, rest)
        whole = count == len(block.ids)
        if count and (best is None or (count, whole) > (best.count, best.whole)):
            best = Step(block.key, at, count, whole)
    for count in range(len(rest), best.count if best else 0, -1):
        key = block_key(parent, rest[:count])
        if key in on_disk:
            return Step(key, at, count, True)
    return best


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _until(steps: Sequence[Step], length: int) -> tuple[Step, ...]:
    return tuple(
        step if step.end <= length else Step(step.key, step.begin, length - step.begin, False)
        for step in steps
        if step.begin < length
    )


def _best_state(
    memory: Memory, on_disk: Collection[bytes], root: bytes, steps: Sequence[Step], ids: Sequence[int]
) -> tuple[int, bytes | None, tuple[bytes, ...]]:
    """(length, key of the state, blocks beyond the steps that lead to it). ids: those that agree."""
    agreed = len(ids)
    # Where blocks begin that may end in a state, the last first.
    places = [(root, 0), *((step.key, step.end) for step in steps if step.count == BLOCK and step.end < agreed)]
    places.reverse()
    standing: tuple[int, bytes | None, tuple[bytes, ...]] = (0, None, ())
    for depth, (key, at) in enumerate(places):
        end = _ending(memory, on_disk, key, tuple(ids[at : at + BLOCK]), ends=depth < _MOST_ENDS)
        if end is not None:
            standing = (at + end[0], state_key(end[1]), (end[1],))
            break
    if standing[0] == agreed:
        return standing
    key, at = places[0]
    for state, path in _states_behind(memory, key, tuple(ids[at:])):
        # One whose window still reaches back to where the texts part.
        if state.lowest <= agreed <= state.length:
            return agreed, state.key, path
    return standing


def _ending(
    memory: Memory, on_disk: Collection[bytes], parent: bytes, rest: tuple[int, ...], *, ends: bool
) -> tuple[int, bytes] | None:
    """(ids, key) of the longest block after `parent` that `rest` begins with and that has a state."""
    best: tuple[int, bytes] | None = None
    for block in memory.after(parent):
        count = len(block.ids)
        if (best is None or count > best[0]) and block.ids == rest[:count]:
            state = state_key(block.key)
            if state in memory or state in on_disk:
                best = count, block.key
    if not on_disk:
        return best
    for count in range(len(rest), best[0] if best else 0, -1):
        if ends or count == BLOCK:
            key = block_key(parent, rest[:count])
            if state_key(key) in on_disk:
                return count, key
    return best


def _states_behind(memory: Memory, start: bytes, rest: tuple[int, ...]) -> Iterator[tuple[State, tuple[bytes, ...]]]:
    """States behind the block `start` whose texts go on with `rest`, which is shorter than a block."""
    waiting: list[tuple[bytes, tuple[bytes, ...]]]
    waiting = [(block.key, (block.key,)) for block in memory.after(start) if block.ids[: len(rest)] == rest]
    for _ in range(_MOST_SEARCHED):
        if not waiting:
            return
        key, path = waiting.pop()
        state = memory.state(key)
        if state is not None:
            yield state, path
        waiting.extend((block.key, (*path, block.key)) for block in memory.after(key))
