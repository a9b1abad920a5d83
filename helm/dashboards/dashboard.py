"""A dashboard as a whole: its variables, its rows laid out on the grid, and the links to its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from helm.dashboards.panels import DATASOURCE, Json, Panel, Row

SCHEMA_VERSION = 39
"""Of Grafana 10.4 and 11; later versions migrate it when they load it."""

TAG = "octavo"
"""By which the dashboards find each other."""

GRID = 24


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top, filled from the values of a label. text: what the choice means."""

    name: str
    label: str
    query: str
    text: str

    def render(self) -> Json:
        return {
            "name": self.name,
            "type": "query",
            "label": self.label,
            "description": self.text,
            "datasource": DATASOURCE,
            "definition": self.query,
            "query": {"query": self.query, "refId": f"variable-{self.name}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            # Matches series without the label too: outside of Kubernetes there are no namespaces and pods.
            "allValue": ".*",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "options": [],
            "hide": 0,
            "skipUrlSync": False,
        }


PODS = (
    Variable("namespace", "Namespace", "label_values(octavo_build_info, namespace)", "Kubernetes namespaces."),
    Variable("job", "Job", 'label_values(octavo_build_info{namespace=~"$namespace"}, job)', "Jobs of Prometheus."),
    Variable(
        "pod",
        "Pod",
        'label_values(octavo_build_info{namespace=~"$namespace",job=~"$job"}, pod)',
        "Pods, each with a model runner and its KV manager.",
    ),
    Variable(
        "instance",
        "Instance",
        'label_values(octavo_build_info{namespace=~"$namespace",job=~"$job",pod=~"$pod"}, instance)',
        "Single targets. The runner and the KV manager of a pod are two; choose pods where there are any.",
    ),
)
POOL = Variable(
    "pool",
    "Pool",
    'label_values(octavo_kv_usable_blocks{namespace=~"$namespace",job=~"$job",pod=~"$pod"}, pool)',
    "Pools of the KV managers.",
)
TENANT = Variable(
    "tenant",
    "Tenant",
    'label_values(octavo_runner_tenant_requests_total{namespace=~"$namespace",job=~"$job",pod=~"$pod"}, tenant)',
    "Tenants that requests name; beyond a hundred in a runner they are together as `other`.",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice among fixed values, the first of which is the default."""

    name: str
    label: str
    values: Sequence[str]
    text: str
    default: str

    def render(self) -> Json:
        return {
            "name": self.name,
            "type": "custom",
            "label": self.label,
            "description": self.text,
            "query": ",".join(self.values),
            "multi": False,
            "includeAll": False,
            "current": {"selected": True, "text": self.default, "value": self.default},
            "options": [{"selected": value == self.default, "text": value, "value": value} for value in self.values],
            "hide": 0,
            "skipUrlSync": False,
        }


@dataclass(frozen=True, slots=True)
class Dashboard:
    """name: of its file; its uid is that behind `octavo-`."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable | Choice]

    @property
    def uid(self) -> str:
        return f"octavo-{self.name}"

    def panels(self) -> list[Panel]:
        """All panels, row by row."""
        return [panel for row in self.rows for panel in row.panels]

    def render(self) -> Json:
        """The model that Grafana loads."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": [TAG],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "timezone": "browser",
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timepicker": {},
            "fiscalYearStartMonth": 0,
            "weekStart": "",
            "liveNow": False,
            "annotations": {"list": [_restarts()]},
            "links": [_siblings()],
            "templating": {"list": [_datasource(), *(variable.render() for variable in self.variables)]},
            "panels": _laid_out(self.rows),
        }


def _laid_out(rows: Sequence[Row]) -> list[Json]:
    """The rows one below the other, their panels from left to right; ids count from 1."""
    found: list[Json] = []
    number, y = 1, 0
    for row in rows:
        header = _row_header(row, number, y)
        number, y = number + 1, y + 1
        panels: list[Json] = []
        x = height = 0
        for panel in row.panels:
            if x + panel.width > GRID:
                x, y, height = 0, y + height, 0
            panels.append(panel.render(number, x, y))
            number, x, height = number + 1, x + panel.width, max(height, panel.height)
        y += height
        header["panels"] = panels if row.collapsed else []
        found += [header] if row.collapsed else [header, *panels]
    return found


def _row_header(row: Row, number: int, y: int) -> Json:
    place = {"h": 1, "w": GRID, "x": 0, "y": y}
    return {"id": number, "type": "row", "title": row.title, "collapsed": row.collapsed, "gridPos": place}


def _datasource() -> Json:
    return {
        "name": "datasource",
        "type": "datasource",
        "label": "Data source",
        "description": "The Prometheus that scrapes Octavo.",
        "query": "prometheus",
        "regex": "",
        "multi": False,
        "includeAll": False,
        "current": {},
        "options": [],
        "refresh": 1,
        "hide": 0,
        "skipUrlSync": False,
    }


def _siblings() -> Json:
    return {
        "type": "dashboards",
        "title": "Octavo",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _restarts() -> Json:
    """A line across all panels where a process began anew."""
    return {
        "name": "Starts",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "yellow",
        "expr": (
            'changes(process_start_time_seconds{namespace=~"$namespace",job=~"$job",pod=~"$pod"}[$__rate_interval])'
            " > 0 and on (job, instance) octavo_build_info"
        ),
        "step": "60s",
        "titleFormat": "Restart",
        "textFormat": "{{pod}} {{instance}}",
        "tagKeys": "",
        "useValueForTime": False,
    }
