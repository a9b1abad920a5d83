"""Every dashboard by the rules of Grafana's dashboard-linter, and a few of our own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helm.dashboards.__main__ import files, main
from helm.dashboards.promql import metrics_of
from tests.monitoring.dashboards import FILES, FOLDER, Json, filled, load, panels, targets
from tests.monitoring.promql import metrics, parse, selectors

UNITS = {"short", "none", "percentunit", "ops", "reqps", "s", "bytes", "dateTimeFromNow"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
NAMED = {
    "kv-cache": {
        "Blocks by state", "Unreclaimable share", "Hit rate by tokens", "Tokens looked up and found",
        "Evictions and thrash", "Forks and copies on write", "Sharing factor", "Fragmentation", "Block lifetime",
        "Idle before eviction", "Reuse gap", "Allocation failures", "Session latency", "RPC latency of the KV manager",
        "Waits for blocks", "Headroom forecast", "Books' imbalance",
    },
}  # fmt: skip
"""Panels that must be there."""

each_dashboard = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_the_dashboards_are_those_that_were_promised() -> None:
    assert {path.stem for path in FILES} == {"overview", "kv-cache", "latency", "tenants"}
    for name, titles in NAMED.items():
        assert titles <= {panel["title"] for panel in panels(load(FOLDER / f"{name}.json"))}


def test_the_files_are_what_the_code_makes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_a_changed_or_foreign_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helm.dashboards.__main__.CHART", tmp_path)
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    changed = tmp_path / "dashboards" / "overview.json"
    changed.write_text(changed.read_text().replace("Octavo / Overview", "Octavo"))
    (tmp_path / "dashboards" / "old.json").write_text("{}")
    capsys.readouterr()
    assert main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "overview.json" in said
    assert "old.json" in said
    assert "tenants.json" not in said
    assert main([]) == 0
    assert not (tmp_path / "dashboards" / "old.json").exists()
    assert main(["--check"]) == 0
    assert main(["--help"]) == 2


def test_a_config_map_has_room_for_each() -> None:
    assert all(len(text.encode()) < 500_000 for text in files().values())


@each_dashboard
def test_a_dashboard_can_be_loaded_anywhere(path: Path) -> None:
    dashboard = load(path)
    assert dashboard["uid"] == f"octavo-{path.stem}"
    assert dashboard["schemaVersion"] == 39
    assert dashboard["editable"] is False
    assert dashboard["tags"] == ["octavo"]
    assert dashboard["description"]
    assert "id" not in dashboard
    assert [link["tags"] for link in dashboard["links"]] == [["octavo"]]
    assert dashboard["links"][0]["includeVars"]
    assert dashboard["links"][0]["keepTime"]


@each_dashboard
def test_its_variables_choose_the_source_and_the_pods(path: Path) -> None:
    variables = {each["name"]: each for each in load(path)["templating"]["list"]}
    assert list(variables)[:5] == ["datasource", "namespace", "job", "pod", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for name, variable in variables.items():
        assert variable["label"], name
        assert variable["description"], name
        if variable["type"] == "query":
            assert variable["datasource"] == DATASOURCE
            assert (variable["allValue"], variable["multi"], variable["includeAll"]) == (".*", True, True)
            # Kept up to date as the time is changed.
            assert variable["refresh"] == 2
            asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            assert asked[2] == name
            parse(filled(asked[1], rate="10s", time="1h"))


@each_dashboard
def test_panels_have_ids_and_do_not_overlap(path: Path) -> None:
    everything: list[Json] = []
    for panel in load(path)["panels"]:
        everything += [panel, *panel.get("panels", [])]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


@each_dashboard
def test_a_panel_says_what_it_shows(path: Path) -> None:
    # A tile may have the title of a graph.
    titles = [(panel["title"], panel["type"] == "stat") for panel in panels(load(path))]
    assert len(set(titles)) == len(titles)
    for panel in panels(load(path)):
        name = panel["title"]
        assert re.fullmatch(r"[A-Z0-9].*[^.]", name), name
        assert panel["datasource"] == DATASOURCE, name
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, name
        assert panel["targets"], name
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])]), name
        named = set(re.findall(r"`(\w+)`", panel["description"].rsplit("Metrics: ", 1)[1]))
        used: set[str] = set()
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE, name
            assert target["legendFormat"] or panel["type"] == "table", name
            used |= metrics(filled(target["expr"], rate="10s", time="1h"))
        assert named == used, name


@each_dashboard
def test_queries_ask_for_the_chosen_pods_only(path: Path) -> None:
    for target in targets(path):
        expression = filled(target.expr, rate="10s", time="1h")
        found = selectors(parse(expression))
        assert found, target
        for selector in found:
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert {"namespace", "job", "pod", "instance"} <= labels, (str(target), selector.name)


@each_dashboard
def test_counters_are_asked_for_their_growth_in_the_interval_of_the_panel(path: Path) -> None:
    for target in targets(path):
        for kind, window in re.findall(r"\b(rate|increase)\(\w+\{[^}]*\}\[([^\]]+)\]", target.expr):
            allowed = {"rate": {"$__rate_interval"}, "increase": {"$__rate_interval", "$__range", "10m"}}[kind]
            assert window in allowed, target
        for metric in metrics(filled(target.expr, rate="10s", time="1h")):
            if metric.endswith(("_total", "_bucket", "_sum", "_count")):
                counted = "count (sum by" in target.expr
                assert counted or re.search(rf"(rate|increase)\({metric}\b", target.expr), (str(target), metric)


@each_dashboard
def test_quotients_and_quantiles_are_guarded_against_nothing(path: Path) -> None:
    """A rate of 0 divided by a rate of 0 is NaN, and so is a quantile of nothing."""
    for target in targets(path):
        for divisor in re.findall(r" / (?:on \(\) group_left \(\) )?(.*)", target.expr):
            guarded = divisor.startswith("(") and " > 0)" in divisor
            # An open pool always has blocks.
            assert guarded or "octavo_kv_usable_blocks" in divisor.split("{")[0], target
        # Without `on ()` a series without labels would stand beside those that have some.
        assert " or vector" not in target.expr, target
        for rest in target.expr.split("histogram_quantile(")[1:]:
            assert ">= 0" in rest, target


def test_metrics_are_found_in_expressions() -> None:
    expression = 'rate(octavo_a_total{x="octavo_b"}[5m]) / on (pod) process_c and up{job="x"}'
    assert metrics_of(expression) == ["octavo_a_total", "octavo_b", "process_c", "up"]
