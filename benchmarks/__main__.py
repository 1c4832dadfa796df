"""`python -m benchmarks [NAME]`: runs one benchmark, or lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rich.console import Console

from benchmarks import bookkeeping, concurrency, drafting, fairness, grammar, lookup, overhead, prefix
from benchmarks.report import Report

BENCHMARKS: dict[str, Callable[[Console], Report]] = {
    "bookkeeping": bookkeeping.run,
    "concurrency": concurrency.run,
    "drafting": drafting.run,
    "fairness": fairness.run,
    "grammar": grammar.run,
    "lookup": lookup.run,
    "overhead": overhead.run,
    "prefix": prefix.run,
}


def main() -> int:
    """Prints a table and, as the last line, one JSON object; writes both and a chart into benchmarks/results."""
    console = Console(stderr=True)
    if len(sys.argv) != 2 or sys.argv[1] not in BENCHMARKS:
        for name, run in BENCHMARKS.items():
            print(f"make bench NAME={name:<10} {(sys.modules[run.__module__].__doc__ or '').splitlines()[0]}")
        return 0 if len(sys.argv) == 1 else 2
    report = BENCHMARKS[sys.argv[1]](console)
    report.save()
    console.print(report.table())
    print(report.json_line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
