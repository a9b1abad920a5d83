"""Writes the dashboards and the rules into the chart; --check says whether they are as this code makes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from helm.dashboards.kv_cache import KV_CACHE
from helm.dashboards.latency import LATENCY
from helm.dashboards.overview import OVERVIEW
from helm.dashboards.rules import rules
from helm.dashboards.tenants import TENANTS

CHART = Path(__file__).parents[1] / "octavo"
DASHBOARDS = (OVERVIEW, KV_CACHE, LATENCY, TENANTS)
RULES_HEADER = (
    "# Made by `python -m helm.dashboards` from helm/dashboards/rules.py. The chart puts an address for RUNBOOKS.\n"
)


def files() -> dict[Path, str]:
    """What each file is to say."""
    found = {
        CHART / "dashboards" / f"{dashboard.name}.json": json.dumps(dashboard.render(), indent=1) + "\n"
        for dashboard in DASHBOARDS
    }
    found[CHART / "rules" / "octavo.yaml"] = RULES_HEADER + yaml.safe_dump(rules(), sort_keys=False, width=120)
    return found


def main(arguments: list[str]) -> int:
    """The exit code: 1 when --check finds a file that is not as it should be, 2 for other arguments."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m helm.dashboards [--check]", file=sys.stderr)
        return 2
    wanted = files()
    present = {path for folder in ("dashboards", "rules") for path in (CHART / folder).glob("*") if path.is_file()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    foreign = sorted(present - wanted.keys())
    if arguments:
        for path in [*stale, *foreign]:
            print(f"{path} is not what python -m helm.dashboards makes; run it", file=sys.stderr)
        return 1 if stale or foreign else 0
    for path in foreign:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
