"""The dashboards as they lie in the chart, and their queries as Grafana would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

FOLDER = Path(__file__).parents[2] / "helm" / "octavo" / "dashboards"
FILES = sorted(FOLDER.glob("*.json"))

VARIABLES = dict.fromkeys(("namespace", "job", "pod", "instance", "pool", "tenant"), ".*")
VARIABLES |= {"ttft": "1.0", "itl": "0.1"}


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel."""

    dashboard: str
    panel: str
    ref_id: str
    expr: str

    def __str__(self) -> str:
        return f"{self.dashboard}: {self.panel} ({self.ref_id})"


def load(path: Path) -> Json:
    dashboard: Json = json.loads(path.read_text())
    return dashboard


def panels(dashboard: Json) -> Iterator[Json]:
    """All panels but the rows, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def targets(*paths: Path) -> list[Target]:
    """All queries of some dashboards, or of all."""
    return [
        Target(path.stem, panel["title"], target["refId"], target["expr"])
        for path in paths or FILES
        for panel in panels(load(path))
        for target in panel["targets"]
    ]


def filled(expression: str, *, rate: str, time: str) -> str:
    """An expression with all variables chosen, over a rate's interval and a dashboard's time, like 10s and 1h."""
    expression = expression.replace("$__rate_interval", rate).replace("$__range", time)
    return re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], expression)
