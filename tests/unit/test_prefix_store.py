"""The prefix cache without a model: what is found is what was kept, nothing is over its limit, and files are whole or gone."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs
from unit.prefix_items import ROOT, blocks_of

from target_service.config import TargetSettings
from target_service.prefix.codec import DamagedFile, decode, encode
from target_service.prefix.counts import PrefixCounts
from target_service.prefix.disk import Disk, DiskUnavailable
from target_service.prefix.identity import files_digest
from target_service.prefix.keys import BLOCK, block_key, namespace, root_key, state_key
from target_service.prefix.layout import LeafState
from target_service.prefix.lookup import find, missing
from target_service.prefix.memory import Block, Item, Memory, State


def state_of(block: Block, lowest: int | None = None) -> State:
    length = block.begin + len(block.ids)
    leaf = LeafState(arrays=(np.full((1, 3), length, np.float32), None), dtypes=("float32", ""), numbers=(length,))
    return State(
        key=state_key(block.key),
        parent=block.key,
        length=length,
        lowest=length if lowest is None else lowest,
        leaves=(leaf,),
    )


def common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.randoms(use_true_random=False), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_rows_serve_the_longest_common_prefix_with_any_text(dice: random.Random, multiple: int) -> None:
    """Against a search through all texts."""
    memory = Memory(1 << 30, PrefixCounts())
    texts: list[list[int]] = []
    for _ in range(dice.randrange(1, 8)):
        base = dice.choice(texts)[: dice.randrange(150)] if texts else []
        texts.append([*base, *(dice.randrange(3) for _ in range(dice.randrange(1, 90)))])
        memory.add(blocks_of(texts[-1]))
        assert missing(memory, ROOT, texts[-1], stateful=False) == len(texts[-1])
    for _ in range(5):
        base = dice.choice(texts)
        prompt = [*base[: dice.randrange(len(base) + 1)], *(dice.randrange(3) for _ in range(dice.randrange(1, 40)))]
        found = find(memory, (), ROOT, prompt, limit=len(prompt) - 1, stateful=False, multiple=multiple)
        longest = min(len(prompt) - 1, max(common(prompt, text) for text in texts))
        assert found.length == longest - longest % multiple
        ids: list[int] = []
        for step in found.steps:
            block = memory.block(step.key)
            assert block is not None
            assert step.begin == len(ids)
            ids += block.ids[: step.count]
        assert ids == prompt[: found.length]
        assert not find(memory, (), root_key(b"", owner="", salt="x"), prompt, limit=9, stateful=False).length


@given(st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_a_state_serves_where_it_stands_or_reaches_back_to(dice: random.Random) -> None:
    memory = Memory(1 << 30, PrefixCounts())
    kept: list[tuple[list[int], int]] = []
    for _ in range(dice.randrange(1, 7)):
        base = dice.choice(kept)[0][: dice.randrange(150)] if kept else []
        text = [*base, *(dice.randrange(3) for _ in range(dice.randrange(1, 90)))]
        lowest = max(0, len(text) - dice.choice([0, 0, 40]))
        path = blocks_of(text)
        memory.add([*path, state_of(path[-1], lowest)])
        kept = [entry for entry in kept if entry[0] != text] + [(text, lowest)]
    for _ in range(5):
        base = dice.choice(kept)[0]
        prompt = [*base[: dice.randrange(len(base) + 1)], *(dice.randrange(3) for _ in range(dice.randrange(1, 40)))]
        limit = len(prompt) - 1
        found = find(memory, (), ROOT, prompt, limit=limit, stateful=True)
        agreed = min(limit, max(common(prompt, text) for text, _ in kept))
        assert found.agreed == agreed
        exact = max((len(text) for text, _ in kept if len(text) <= agreed and prompt[: len(text)] == text), default=0)
        reaching = [low for text, low in kept if min(limit, common(prompt, text)) == agreed and low <= agreed]
        assert found.length == (agreed if reaching and agreed else exact)
        if found.length:
            assert found.state is not None
            state = memory.get(found.state)
            assert isinstance(state, State)
            assert state.lowest <= found.length <= state.length


def test_memory_stays_under_its_limit_and_loses_ends_before_beginnings() -> None:
    counts = PrefixCounts()
    dice = random.Random(3)
    texts = [[number, *(dice.randrange(256) for _ in range(4 * BLOCK))] for number in range(9)]
    size = sum(block.nbytes for block in blocks_of(texts[0]))
    memory = Memory(3 * size, counts)
    for number, text in enumerate(texts):
        path = blocks_of(text)
        memory.add([*path, state_of(path[-1])] if number % 2 else path)
        assert counts.memory_bytes <= 3 * size
        held = [memory.get(key) for key in memory._items]
        assert counts.memory_bytes == sum(item.nbytes for item in held if item is not None)
        for item in held:
            assert item is not None
            assert item.parent in memory or (isinstance(item, Block) and item.begin == 0), "a block without its parent"
    assert counts.memory_evictions > 0
    assert find(memory, (), ROOT, [*texts[8], 1], limit=999, stateful=False).length == len(texts[8])
    # One that is used again outlives those that came after it.
    memory.add(blocks_of(texts[7]))
    memory.add(blocks_of([77] * 4 * BLOCK))
    memory.add(blocks_of([78] * BLOCK))
    assert find(memory, (), ROOT, [*texts[7], 1], limit=999, stateful=False).length == len(texts[7])
    memory.clear()
    assert counts.memory_bytes == counts.memory_entries == 0


def test_keys_tell_everything_apart() -> None:
    base = namespace({"model": "m"})
    keys = {
        root_key(base, owner=owner, salt=salt) for owner in ("", "a", "ab", '","') for salt in ("", "a", "ab", '","')
    }
    assert len(keys) == 16
    assert namespace({"model": "m", "numerics": "exact"}) != namespace({"model": "m", "numerics": "fast"})
    ids = list(range(BLOCK))
    assert len({block_key(ROOT, ids), block_key(ROOT, ids[:-1]), block_key(base, ids), state_key(ROOT)}) == 4


def test_a_file_gives_back_the_item_bit_for_bit() -> None:
    (block,) = blocks_of([1, 2, 3, 4_000_000_000])
    whole = decode(encode(block), block.key)
    assert isinstance(whole, Block)
    assert (whole.key, whole.parent, whole.begin, whole.ids) == (block.key, block.parent, block.begin, block.ids)
    for one, other in zip(whole.rows, block.rows, strict=True):
        np.testing.assert_array_equal(one, other)
    state = state_of(block, 1)
    back = decode(encode(state), state.key)
    assert isinstance(back, State)
    assert (back.length, back.lowest, back.leaves[0].numbers, back.leaves[0].dtypes) == (4, 1, (4,), ("float32", ""))
    assert back.leaves[0].arrays[1] is None
    np.testing.assert_array_equal(back.leaves[0].arrays[0], state.leaves[0].arrays[0])


@given(st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_no_damage_goes_unseen(dice: random.Random) -> None:
    """Flipped bits, cut and lengthened files, and files under another's name."""
    (block,) = blocks_of(list(range(7)))
    content = bytearray(encode(block))
    match dice.randrange(3):
        case 0:
            content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        case 1:
            del content[dice.randrange(len(content)) :]
        case _:
            content += dice.randbytes(dice.randrange(1, 9))
    with pytest.raises(DamagedFile):
        decode(bytes(content), block.key)
    with pytest.raises(DamagedFile, match="another prefix"):
        decode(encode(block), ROOT)


@contextmanager
def opened(folder: Path, limit: int = 1 << 30) -> Iterator[tuple[Disk, PrefixCounts]]:
    counts = PrefixCounts()
    disk = Disk(folder, limit, counts)
    try:
        yield disk, counts
    finally:
        disk.close()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def test_a_disk_keeps_items_over_a_restart_and_stays_under_its_limit(tmp_path: Path) -> None:
    texts = [[number] * 3 * BLOCK for number in range(6)]
    size = sum(len(encode(block)) for block in blocks_of(texts[0]))
    with opened(tmp_path, 3 * size) as (disk, counts):
        for text in texts:
            for block in blocks_of(text):
                disk.write(block)
            disk.touch([block.key for block in blocks_of(text)])
        disk.settle()
        assert counts.disk_writes == 18
        assert counts.disk_evictions == 9
        # Whole texts, not all beginnings or all ends: what was used longest ago went.
        assert [[block.key in disk for block in blocks_of(text)] for text in texts] == [[False] * 3] * 3 + [
            [True] * 3
        ] * 3
        disk.touch([block.key for block in blocks_of(texts[3])])
    assert sum(path.stat().st_size for path in files(tmp_path)) == counts.disk_bytes <= 3 * size
    with opened(tmp_path, 2 * size) as (disk, counts):
        # A lower limit holds at once, and the order of use outlived the restart: the end of the oldest went first.
        assert counts.disk_bytes <= 2 * size
        assert all(block.key in disk for block in blocks_of(texts[3]))
        assert not any(block.key in disk for block in blocks_of(texts[4]))
        for block in blocks_of(texts[3]):
            again = disk.read(block.key)
            assert isinstance(again, Block)
            assert again.ids == block.ids
    with opened(tmp_path, 100) as (disk, counts):
        assert counts.disk_bytes == counts.disk_entries == 0
        disk.write(blocks_of([1])[0])
        disk.settle()
        assert counts.disk_skipped == 1
        assert not files(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "renamed", "garbage", "gone", "unreadable"])
def test_a_file_that_is_not_right_is_dropped_with_a_warning(damage: str, tmp_path: Path) -> None:
    one, other = blocks_of([1, 2, 3])[0], blocks_of([4, 5])[0]
    with opened(tmp_path) as (disk, _):
        disk.write(one)
        disk.write(other)
    path = next(path for path in files(tmp_path) if path.stem == one.key.hex())
    content = path.read_bytes()
    with opened(tmp_path) as (disk, counts), capture_logs() as logs:
        match damage:
            case "truncated":
                path.write_bytes(content[:-3])
            case "empty":
                path.write_bytes(b"")
            case "flipped":
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
            case "renamed":
                path.write_bytes(path.with_name(f"{other.key.hex()}.safetensors").read_bytes())
            case "garbage":
                path.write_bytes(b"\xff" * 500)
            case "gone":
                path.unlink()
            case "unreadable":
                path.unlink()
                path.mkdir()
        assert disk.read(one.key) is None
        assert one.key not in disk
        assert isinstance(disk.read(other.key), Block)
        assert counts.disk_bytes == sum(path.stat().st_size for path in files(tmp_path) if path.is_file())
        dropped = damage not in ("gone", "unreadable")
        assert counts.disk_dropped == int(dropped)
        assert counts.disk_errors == int(damage == "unreadable")
        assert path.exists() == (damage == "unreadable")
        assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == (
            ["stored_prefix_dropped"] if dropped else ["prefix_disk_failed"] * (damage == "unreadable")
        )


def test_leftovers_go_and_foreign_files_stay(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    own = next(tmp_path.iterdir())
    (own / f"{'0' * 64}.part").write_bytes(b"half")
    (own / "notes.txt").write_text("mine")
    with capture_logs() as logs, opened(tmp_path) as (_, counts):
        assert counts.disk_entries == 0
    assert sorted(path.name for path in own.iterdir()) == ["lock", "notes.txt"]
    assert [entry["file"] for entry in logs if entry["event"] == "foreign_file"] == ["notes.txt"]
    assert own.stat().st_mode & 0o077 == 0


def test_a_directory_has_one_owner_and_must_be_writable(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(DiskUnavailable, match="used by another process"):
        Disk(tmp_path, 1 << 20, PrefixCounts())
    with opened(tmp_path):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskUnavailable, match="cannot be written"):
        Disk(tmp_path / "file", 1 << 20, PrefixCounts())


def test_a_full_disk_is_counted_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, goal: object) -> None:
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as (disk, counts), capture_logs() as logs:
        monkeypatch.setattr(os, "replace", full)
        for block in blocks_of(list(range(3 * BLOCK))):
            disk.write(block)
        disk.settle()
        assert (counts.disk_errors, counts.disk_entries, counts.disk_bytes) == (3, 0, 0)
        assert [entry["reason"] for entry in logs] == ["No space left on device"], "said once, not three times"
        monkeypatch.undo()
        disk.write(blocks_of([1])[0])
        disk.settle()
        assert counts.disk_entries == 1
    assert [path.suffix for path in next(tmp_path.iterdir()).iterdir() if path.name != "lock"] == [".safetensors"]


def test_a_removed_item_is_not_written_behind_its_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end whose text goes on is superseded while it still waits to be written."""
    going = threading.Event()
    put = Disk._put

    def slow(self: Disk, item: Item) -> None:
        going.wait(10)
        put(self, item)

    monkeypatch.setattr(Disk, "_put", slow)
    one, other = blocks_of([1, 2, 3])[0], blocks_of([4, 5])[0]
    with opened(tmp_path) as (disk, _):
        disk.write(one)
        disk.write(other)
        disk.remove(other.key)
        going.set()
        disk.settle()
    assert [path.stem for path in files(tmp_path)] == [one.key.hex()]


def test_a_disk_that_is_too_far_behind_is_spared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = blocks_of([1, 2, 3])[0]
    monkeypatch.setattr("target_service.prefix.disk._BACKLOG_BYTES", block.nbytes - 1)
    with opened(tmp_path) as (disk, counts):
        disk.write(block)
        assert counts.disk_skipped == 1


_WRITER = """
import sys
from pathlib import Path
from unit.prefix_items import blocks_of
from target_service.prefix.counts import PrefixCounts
from target_service.prefix.disk import Disk
disk = Disk(Path(sys.argv[1]), 1 << 30, PrefixCounts())
number = int(sys.argv[2])
while True:
    for block in blocks_of([number] * 128, dim=2000):
        disk.write(block)
    disk.settle()
    number += 1
    print(number, flush=True)
"""


def test_kill_9_during_writes_loses_at_most_what_was_being_written(tmp_path: Path) -> None:
    """A real SIGKILL at any moment; afterwards the directory opens and every entry verifies."""
    dice = random.Random(9)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    said = 0
    halves = 0
    for attempt in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(1000 * attempt)],
            stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip
        assert child.stdout is not None
        with child, child.stdout:
            done = [int(child.stdout.readline()) for _ in range(dice.randrange(1, 6))]
            # Into the middle of a write: the next part file is there.
            while attempt % 2 and not list(tmp_path.glob("*/*.part")):
                assert child.poll() is None
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
        said = done[-1]
        halves += len(list(tmp_path.glob("*/*.part")))
        with opened(tmp_path) as (disk, counts):
            for number in range(1000 * attempt, said):
                for block in blocks_of([number] * 128, dim=2):
                    assert isinstance(disk.read(block.key), Block), "an entry whose write had ended is gone"
            for path in files(tmp_path):
                assert disk.read(bytes.fromhex(path.stem)) is not None
            assert counts.disk_dropped == counts.disk_errors == 0
            assert not list(tmp_path.glob("*/*.part"))
    assert halves > 0, "no kill hit a write: the test proves nothing"


def test_a_digest_changes_with_the_files_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, memo = tmp_path / "model", tmp_path / "memo"
    model.mkdir()
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json"):
        (model / name).write_text(name)
    first = files_digest(model, memo)
    assert files_digest(model, tmp_path / "elsewhere") == first
    (model / "tokenizer.json").write_text("other")
    assert files_digest(model, memo) == first
    # Another content of the same size and modification time.
    before = (model / "model-2.safetensors").stat()
    (model / "model-2.safetensors").write_text("model-2.safetensorz")
    os.utime(model / "model-2.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    second = files_digest(model, memo)
    assert second != first
    (memo / "models.json").write_text("[]")
    assert files_digest(model, memo) == second
    opened_files: list[str] = []
    real = Path.open

    def watched(self: Path, *args: object, **more: object) -> object:
        opened_files.append(self.name)
        return real(self, *args, **more)  # type: ignore[arg-type, call-overload]

    monkeypatch.setattr(Path, "open", watched)
    assert files_digest(model, memo) == second
    assert not {name for name in opened_files if name.startswith(("model-", "config"))}


@pytest.mark.parametrize(
    ("given_settings", "fault"),
    [
        ({"prompt_cache_bytes": -1}, "greater than or equal to 0"),
        ({"prompt_cache_disk_bytes": 0}, "greater than or equal to 1"),
        ({"prompt_cache_bytes": 0, "prompt_cache_dir": "x"}, "needs --prompt-cache-bytes above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(given_settings: dict[str, object], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        TargetSettings(_cli_parse_args=False, **given_settings)  # type: ignore[call-arg, arg-type]


def test_a_snapshot_is_a_copy() -> None:
    counts = PrefixCounts()
    before = counts.snapshot()
    counts.hits += 1
    assert (before.hits, counts.hits) == (0, 1)
    assert all(isinstance(value, int) for value in dataclasses.asdict(before).values())
