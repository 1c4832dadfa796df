"""What the prefix cache did and holds, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True, kw_only=True)
class PrefixCounts:
    """Counters only grow; `..._bytes` and `..._entries` are what is held now. Entries are blocks and states."""

    lookups: int = 0
    hits: int = 0
    """Prompts of which something was reused."""
    misses: int = 0
    prompt_tokens: int = 0
    """Tokens of the prompts that were looked up."""
    reused_tokens: int = 0
    disk_reused_tokens: int = 0
    """Those of `reused_tokens` whose rows came from disk."""
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    memory_entries: int = 0
    memory_evictions: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_entries: int = 0
    disk_evictions: int = 0
    disk_writes: int = 0
    disk_reads: int = 0
    disk_skipped: int = 0
    """Entries that were not written because the disk was too far behind."""
    disk_errors: int = 0
    """Reads and writes that the system refused."""
    disk_dropped: int = 0
    """Files that were damaged or not what their name says, and are gone."""

    def snapshot(self) -> PrefixCounts:
        """A copy, for an exporter."""
        return replace(self)
