"""Blocks and states on disk: one file each, named by its key, written by a thread of its own and renamed into place.

A file is there as a whole or not at all, so a process may be killed at any moment; what the system loses after that (a power
cut) the checksum finds. Every method but `read` and `close` returns at once; those two belong on a helper thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from draftwire.logs import get_logger
from target_service.prefix.codec import DamagedFile, decode, encode
from target_service.prefix.counts import PrefixCounts
from target_service.prefix.memory import Item

_log = get_logger("prefix")
_NAME: Final = re.compile(r"([0-9a-f]{64})\.safetensors")
_TEMPORARY: Final = ".part"
_BACKLOG_BYTES: Final = 256 << 20
_FLUSH_S: Final = 3.0
_QUIET_S: Final = 60.0


class DiskUnavailable(OSError):
    """The directory cannot be used; the message has the reason and the remedy."""


class Disk:
    """A byte-capped directory of items, least recently used first. Safe to call from any thread."""

    def __init__(self, directory: Path, limit_bytes: int, counts: PrefixCounts) -> None:
        """Takes the directory for itself, makes it where it is missing, and finds what is there.

        Raises DiskUnavailable where it cannot be written or another process has it.
        """
        self._directory = directory / "draftwire-prefix-1"
        self._limit = limit_bytes
        self._counts = counts
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._queued: dict[bytes, None] = {}
        self._queued_bytes = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._give_up_s: float | None = None
        self._complained_s = -_QUIET_S
        counts.disk_limit_bytes = limit_bytes
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._own = os.open(self._directory / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise DiskUnavailable(f"{self._directory} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._own)
            raise DiskUnavailable(f"{self._directory} is used by another process; give each its own") from error
        self._look()
        self._thread = threading.Thread(target=self._work, name="prefix-disk", daemon=True)
        self._thread.start()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        with self._lock:
            return iter(list(self._sizes))

    def write(self, item: Item) -> None:
        """Queues an item, unless it is there already or the disk is too far behind."""
        with self._lock:
            if item.key in self._sizes or item.key in self._queued:
                return
            if self._queued_bytes + item.nbytes > _BACKLOG_BYTES:
                self._counts.disk_skipped += 1
                return
            self._queued[item.key] = None
            self._queued_bytes += item.nbytes
            self._jobs.put(lambda: self._put(item))

    def touch(self, path: Sequence[bytes]) -> None:
        """Says that a path was used; its end counts as used before its beginning."""
        self._jobs.put(lambda: self._mark_used(path))

    def read(self, key: bytes) -> Item | None:
        """The item; None where it is gone or damaged, which is logged and takes it away."""
        path = self._path(key)
        try:
            item = decode(path.read_bytes(), key)
        except FileNotFoundError:
            self._forget(key)
            return None
        except DamagedFile as error:
            self._count("disk_dropped")
            _log.warning("stored_prefix_dropped", file=path.name, reason=str(error))
            self.remove(key)
            return None
        except OSError as error:
            self._failed("read", error)
            self._forget(key)
            return None
        self._count("disk_reads")
        return item

    def remove(self, key: bytes) -> None:
        """Takes an item away, or keeps it from being written. Idempotent."""
        with self._lock:
            self._queued.pop(key, None)
        if self._forget(key):
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def close(self, within_s: float = _FLUSH_S) -> None:
        """Writes what is queued, as far as it gets, and ends."""
        self._give_up_s = time.monotonic() + within_s
        self._jobs.put(None)
        self._thread.join()
        os.close(self._own)

    def settle(self) -> None:
        """Waits until what was queued so far has been written; for tests and benchmarks."""
        while self._thread.is_alive() and self._queued:
            time.sleep(0.005)

    def _path(self, key: bytes) -> Path:
        return self._directory / f"{key.hex()}.safetensors"

    def _look(self) -> None:
        """The files that are there, in the order of their last use. Leftovers of a killed process go."""
        found: list[tuple[int, bytes, int]] = []
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    match = _NAME.fullmatch(entry.name)
                    if match and entry.is_file(follow_symlinks=False):
                        stat = entry.stat(follow_symlinks=False)
                        found.append((stat.st_mtime_ns, bytes.fromhex(match[1]), stat.st_size))
                    elif entry.name.endswith(_TEMPORARY):
                        os.unlink(entry)
                    elif entry.name != "lock":
                        _log.warning(
                            "foreign_file", file=entry.name, note="left alone; the directory is the cache's own"
                        )
        except OSError as error:
            os.close(self._own)
            raise DiskUnavailable(f"{self._directory} cannot be read: {error.strerror}") from error
        for _, key, size in sorted(found):
            self._sizes[key] = size
        self._counts.disk_bytes = sum(self._sizes.values())
        self._make_room(0)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            # The last item's arrays must not live on through this frame.
            del job

    def _put(self, item: Item) -> None:
        try:
            if item.key not in self._queued:
                return
            if self._give_up_s is not None and time.monotonic() > self._give_up_s:
                self._count("disk_skipped")
                return
            content = encode(item)
            if not self._make_room(len(content)):
                self._count("disk_skipped")
                return
            self._write(self._path(item.key), content)
            with self._lock:
                self._sizes[item.key] = len(content)
                self._counts.disk_bytes += len(content)
                self._counts.disk_entries = len(self._sizes)
            self._count("disk_writes")
        except OSError as error:
            self._failed("write", error)
        finally:
            with self._lock:
                self._queued.pop(item.key, None)
                self._queued_bytes -= item.nbytes

    def _write(self, path: Path, content: bytes) -> None:
        part = path.with_suffix(_TEMPORARY)
        try:
            with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
                file.write(content)
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def _make_room(self, size: int) -> bool:
        """Takes away what was used longest ago. False where the item is too large altogether."""
        if size > self._limit:
            return False
        while self._counts.disk_bytes + size > self._limit:
            with self._lock:
                oldest = next(iter(self._sizes), None)
            if oldest is None:
                break
            self.remove(oldest)
            self._count("disk_evictions")
        self._counts.disk_entries = len(self._sizes)
        return True

    def _forget(self, key: bytes) -> bool:
        with self._lock:
            size = self._sizes.pop(key, None)
            self._counts.disk_bytes -= size or 0
            self._counts.disk_entries = len(self._sizes)
        return size is not None

    def _mark_used(self, keys: Sequence[bytes]) -> None:
        now_ns = time.time_ns()
        for place, key in enumerate(reversed(keys)):
            with self._lock:
                if key not in self._sizes:
                    continue
                self._sizes.move_to_end(key)
            with contextlib.suppress(OSError):
                os.utime(self._path(key), ns=(now_ns, now_ns + place))

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self._counts, name, getattr(self._counts, name) + 1)

    def _failed(self, what: str, error: OSError) -> None:
        self._count("disk_errors")
        now_s = time.monotonic()
        if now_s - self._complained_s >= _QUIET_S:
            self._complained_s = now_s
            _log.warning("prefix_disk_failed", doing=what, reason=error.strerror or str(error))
