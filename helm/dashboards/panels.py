"""Panels as Grafana 10.4 to 13 read them (schema version 39).

Plain data rather than Grafana's SDK: that has a build for each version of Grafana, and these must load in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helm.dashboards.promql import expand, metrics_of

Json = dict[str, Any]

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}

WIDE = 12
"""From this width on a legend has room beside the graph."""

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "red", "blue", "#8e8e8e"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression in the short hand of helm.dashboards.promql, and the name of what it yields.

    axis: of its unit, where that is not the panel's. colour, dashed, unstacked: how it is drawn.
    """

    expr: str
    legend: str
    unit: str = ""
    colour: str = ""
    dashed: bool = False
    unstacked: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """What every kind of panel has. text: what it means and what to do about it. unit: one of Grafana's.

    width: of 24. thresholds: (from this value on, colour), the first without a value for what lies below.
    """

    title: str
    text: str
    unit: str
    queries: Sequence[Query]
    width: int = 8
    height: int = 8
    minimum: float | None = 0
    maximum: float | None = None
    decimals: int | None = None
    thresholds: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    links: Sequence[tuple[str, str]] = ()
    """Titles, and uids of the dashboards that tell more."""

    kind = ""
    query_format = "time_series"
    instant = False

    @property
    def description(self) -> str:
        """The text, and by name the metrics that the panel is made of."""
        names = [name for query in self.queries for name in metrics_of(query.expr)]
        return f"{self.text}\n\nMetrics: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}."

    def render(self, number: int, x: int, y: int) -> Json:
        """The panel as JSON, at a place of the grid."""
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self.defaults(), "overrides": self.overrides()},
            "options": self.options(),
            "links": [_link(title, uid) for title, uid in self.links],
            "transformations": self.transformations(),
            "targets": [self._target(place, query) for place, query in enumerate(self.queries)],
        }

    def defaults(self) -> Json:
        steps = [{"color": colour, "value": value} for value, colour in self.thresholds]
        found: Json = {
            "unit": self.unit,
            "color": {"mode": "palette-classic"},
            "thresholds": {"mode": "absolute", "steps": steps},
            "mappings": [],
            "custom": self.custom(),
        }
        optional = {"min": self.minimum, "max": self.maximum, "decimals": self.decimals}
        return found | {key: value for key, value in optional.items() if value is not None}

    def custom(self) -> Json:
        return {}

    def options(self) -> Json:
        return {}

    def transformations(self) -> list[Json]:
        return []

    def overrides(self) -> list[Json]:
        return []

    def _target(self, place: int, query: Query) -> Json:
        return {
            "refId": _ref_id(place),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expand(query.expr),
            "format": self.query_format,
            "instant": self.instant,
            "range": not self.instant,
            "legendFormat": query.legend,
        }


@dataclass(frozen=True, slots=True)
class Lines(Panel):
    """Time series. stacked: they add up to something. soft_max: how far the axis goes at least."""

    stacked: bool = False
    soft_max: float | None = None

    kind = "timeseries"

    def custom(self) -> Json:
        soft = {} if self.soft_max is None else {"axisSoftMax": self.soft_max}
        return soft | {
            "drawStyle": "line",
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "fillOpacity": 40 if self.stacked else 8,
            "gradientMode": "none",
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "axisPlacement": "auto",
            "thresholdsStyle": {"mode": "dashed" if len(self.thresholds) > 1 else "off"},
        }

    def options(self) -> Json:
        wide = self.width >= WIDE
        return {
            "legend": {
                "showLegend": True,
                "displayMode": "table" if wide else "list",
                "placement": "right" if wide else "bottom",
                "calcs": ["lastNotNull", "max"] if wide else ["lastNotNull"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }

    def overrides(self) -> list[Json]:
        return [found for place, query in enumerate(self.queries) if (found := _override(_ref_id(place), query))]


@dataclass(frozen=True, slots=True)
class Stat(Panel):
    """One number, coloured by the thresholds, with its past behind it."""

    width: int = 3
    height: int = 4

    kind = "stat"

    def defaults(self) -> Json:
        return Panel.defaults(self) | {"color": {"mode": "thresholds"}}

    def options(self) -> Json:
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "orientation": "auto",
            "textMode": "auto",
            "colorMode": "value",
            "graphMode": "area",
            "justifyMode": "auto",
        }


@dataclass(frozen=True, slots=True)
class Heatmap(Panel):
    """The buckets of one histogram over time."""

    kind = "heatmap"
    query_format = "heatmap"

    def options(self) -> Json:
        return {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "exponent": 0.5, "reverse": False},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "tooltip": {"mode": "single", "yHistogram": True},
            "yAxis": {"axisPlacement": "left", "unit": self.unit, "reverse": False},
        }


@dataclass(frozen=True, slots=True)
class Bars(Panel):
    """One bar for each series, by its last value."""

    kind = "bargauge"
    instant = True

    def options(self) -> Json:
        return {
            "displayMode": "basic",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "showUnfilled": True,
            "valueMode": "color",
            "minVizWidth": 8,
            "minVizHeight": 16,
        }


@dataclass(frozen=True, slots=True)
class Table(Panel):
    """The labels of series as rows. hidden: labels that say nothing here. values: the names of the queries' columns."""

    hidden: Sequence[str] = ()
    values: Sequence[str] = ()

    kind = "table"
    query_format = "table"
    instant = True

    def options(self) -> Json:
        return {"showHeader": True, "cellHeight": "sm", "footer": {"show": False}}

    def custom(self) -> Json:
        return {"align": "auto", "cellOptions": {"type": "auto"}, "filterable": True}

    def transformations(self) -> list[Json]:
        excluded = dict.fromkeys(("Time", *self.hidden), True)
        places = range(len(self.values))
        columns = [f"Value #{_ref_id(place)}" for place in places] if len(places) > 1 else ["Value"]
        renamed = dict(zip(columns, self.values, strict=False))
        if not self.values:
            excluded["Value"] = True
        merge: list[Json] = [{"id": "merge", "options": {}}] if len(self.values) > 1 else []
        return [*merge, {"id": "organize", "options": {"excludeByName": excluded, "renameByName": renamed}}]


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a title, laid out from left to right."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


def _link(title: str, uid: str) -> Json:
    return {"title": title, "url": f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}", "targetBlank": False}


def _ref_id(place: int) -> str:
    return chr(ord("A") + place)


def _override(ref_id: str, query: Query) -> Json | None:
    """How the series of one query are drawn, if not like the others."""
    properties: list[Json] = []
    if query.colour:
        properties.append({"id": "color", "value": {"mode": "fixed", "fixedColor": query.colour}})
    if query.unit:
        properties.append({"id": "unit", "value": query.unit})
        properties.append({"id": "custom.axisPlacement", "value": "right"})
    if query.dashed:
        properties.append({"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}})
        properties.append({"id": "custom.fillOpacity", "value": 0})
    if query.unstacked:
        properties.append({"id": "custom.stacking", "value": {"mode": "none", "group": "B"}})
    if not properties:
        return None
    return {"matcher": {"id": "byFrameRefID", "options": ref_id}, "properties": properties}
