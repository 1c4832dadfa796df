"""What every benchmark ends with: a table, a chart, and one JSON object with the machine and the figures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("draftwire", "mlx", "mlx-lm", "grpcio", "cmeel-openblas", "xgrammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one run. Ratios were measured alternately in that run; times are medians unless a name says otherwise."""

    name: str
    figures: Mapping[str, float | int | str]
    setting: Mapping[str, Any]
    """Models, drafts a round, threads: whatever the figures depend on."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bars: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Chart: series -> one value a group."""
    groups: Sequence[str] = ()
    unit: str = ""

    def document(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "name": self.name,
            "machine": machine(),
            "figures": dict(self.figures),
            "setting": dict(self.setting),
            "versions": {package: version(package) for package in _PACKAGES},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def json_line(self) -> str:
        """The object on one line."""
        return json.dumps(self.document())

    def table(self) -> Table:
        """For people."""
        table = Table(*self.columns, title=self.name)
        for row in self.rows:
            table.add_row(*row)
        for figure, value in self.figures.items():
            table.add_row(figure, str(value), style="bold")
        return table

    def save(self) -> None:
        """Writes NAME.json and NAME.png into benchmarks/results."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(self.document(), indent=2) + "\n")
        if self.bars:
            self._chart(RESULTS / f"{self.name}.png")

    def _chart(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 4.5))
        width = 0.8 / len(self.bars)
        for index, (series, values) in enumerate(self.bars.items()):
            places = [group + index * width for group in range(len(values))]
            bars = axes.bar(places, values, width, label=series)
            axes.bar_label(bars, fmt="%.3g", fontsize=8)
        axes.set_xticks([group + 0.4 - width / 2 for group in range(len(self.groups))], self.groups)
        axes.set_ylabel(self.unit)
        axes.set_title(f"{self.name}: {machine()}", fontsize=9)
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def machine() -> str:
    """Processor and cores, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()}"
