"""The tables of docs/metrics.md, and what a scrape has, in one form that can be compared."""

from __future__ import annotations

import re
import urllib.request
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Documented:
    """One row: name as Prometheus knows it, type, labels."""

    name: str
    type: str
    labels: tuple[str, ...]


def documented(*places: str) -> dict[str, Documented]:
    """The rows of tables of docs/metrics.md, by name."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows: dict[str, Documented] = {}
    for place in places:
        (table,) = re.findall(rf"<!-- metrics:{place} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        for line in table.splitlines()[2:]:
            name, kind, labels, meaning = (cell.strip() for cell in line.strip("|").split("|"))
            assert meaning.endswith("."), line
            row = Documented(name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels)))
            assert row.name not in rows, f"{row.name} stands twice"
            rows[row.name] = row
    return rows


class Scrape:
    """What one scrape of an endpoint has."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families: dict[str, Documented] = {}
        self.helps: dict[str, str] = {}
        self._values: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels: dict[str, None] = {}
            for sample in family.samples:
                labels.update(dict.fromkeys(label for label in sample.labels if label != "le"))
                self._values[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
            self.families[name] = Documented(name, family.type, tuple(labels))
            self.helps[name] = family.documentation

    @classmethod
    def of(cls, port: int) -> Scrape:
        """Over HTTP, as Prometheus does."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            return cls(reply.read().decode("utf-8"))

    def value(self, name: str, **labels: str) -> float:
        """A sample; 0 where there is none, as `sum` in a query has it."""
        return self._values[name].get(tuple(sorted(labels.items())), 0.0)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Samples by the value of their only label, zeros left out."""
        return {dict(labels)[label]: value for labels, value in self._values[name].items() if value}

    def total(self, name: str) -> float:
        """Sum over all labels."""
        return sum(self._values[name].values())
