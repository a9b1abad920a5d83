"""Tenants: who asks for how much. Salts are secrets, so the cache shows no tenants; their quotas show as refusals."""

from __future__ import annotations

from helm.dashboards.dashboard import PODS, TENANT, Dashboard
from helm.dashboards.panels import Bars, Lines, Panel, Query, Row, Stat, Table

REQUESTS = "octavo_runner_tenant_requests_total"
PROMPT = "octavo_runner_tenant_prompt_tokens_total"
GENERATED = "octavo_runner_tenant_generation_tokens_total"


def _named(expression: str) -> str:
    """Requests that name no tenant are of one called `none`."""
    return f'label_replace({expression}, "tenant", "none", "tenant", "")'


def _rate(metric: str) -> str:
    return f"sum by (tenant) (rate({metric}{{TENANT}}[RATE]))"


def _range(metric: str) -> str:
    return f"sum by (tenant) (increase({metric}{{TENANT}}[$__range]))"


def _tiles() -> list[Panel]:
    quota = 'sum (rate(octavo_kv_allocation_failures_total{ANY,reason="quota"}[RATE]))'
    busiest = f"max (sum by (tenant) (rate({GENERATED}{{ANY}}[RATE]))) / (sum (rate({GENERATED}{{ANY}}[RATE])) > 0)"
    return [
        Stat(
            "Tenants",
            "Names that were seen since the runners began.",
            "short",
            [Query(f"count (sum by (tenant) ({REQUESTS}{{TENANT}}))", "tenants")],
            width=6,
        ),
        Stat(
            "Requests",
            "That ended, per second.",
            "reqps",
            [Query(f"sum (rate({REQUESTS}{{TENANT}}[RATE]))", "requests/s")],
            width=6,
        ),
        Stat(
            "Share of the busiest",
            "Of all generated tokens, those of the tenant that has most.",
            "percentunit",
            [Query(busiest, "share")],
            width=6,
            maximum=1,
        ),
        Stat(
            "Met their quota",
            "Verbs refused per second because a tenant's quota of blocks was full.",
            "ops",
            [Query(quota, "refused")],
            width=6,
        ),
    ]


def _rates() -> list[Panel]:
    share = f"{_rate(GENERATED)} / on () group_left () (sum (rate({GENERATED}{{ANY}}[RATE])) > 0)"
    return [
        Lines(
            "Requests by tenant",
            "Requests that ended, per second.",
            "reqps",
            [Query(_named(_rate(REQUESTS)), "{{tenant}}")],
            width=12,
        ),
        Lines(
            "Prompt tokens by tenant",
            "Of requests that ended, per second.",
            "short",
            [Query(_named(_rate(PROMPT)), "{{tenant}}")],
            width=12,
        ),
        Lines(
            "Generated tokens by tenant",
            "Of requests that ended, per second.",
            "short",
            [Query(_named(_rate(GENERATED)), "{{tenant}}")],
            width=12,
            stacked=True,
        ),
        Lines(
            "Share of the generated tokens",
            "Who gets how much of what is generated for all tenants.",
            "percentunit",
            [Query(_named(share), "{{tenant}}")],
            width=12,
            maximum=1,
            stacked=True,
        ),
        Lines(
            "Tokens per request by tenant",
            "The mean prompt and the mean answer.",
            "short",
            [
                Query(_named(f"{_rate(PROMPT)} / ({_rate(REQUESTS)} > 0)"), "prompt {{tenant}}"),
                Query(_named(f"{_rate(GENERATED)} / ({_rate(REQUESTS)} > 0)"), "answer {{tenant}}"),
            ],
            width=12,
        ),
        Lines(
            "Quota refusals by pod",
            "Verbs refused because a tenant's quota of blocks was full: its requests wait, or displace its own.",
            "ops",
            [
                Query(
                    'sum by (pod, pool) (rate(octavo_kv_allocation_failures_total{ANY,reason="quota"}[RATE]))',
                    "{{pod}} {{pool}}",
                )
            ],
            width=12,
        ),
    ]


def _totals() -> list[Panel]:
    return [
        Bars(
            "Generated tokens over the chosen time",
            "By tenant, the ten that have most.",
            "short",
            [Query(f"topk(10, {_named(_range(GENERATED))})", "{{tenant}}")],
            width=12,
        ),
        Table(
            "Over the chosen time",
            "Requests and tokens by tenant.",
            "short",
            [Query(_named(_range(metric)), "") for metric in (REQUESTS, PROMPT, GENERATED)],
            width=12,
            values=("requests", "prompt tokens", "generated tokens"),
            decimals=0,
        ),
    ]


TENANTS = Dashboard(
    "tenants",
    "Octavo / Tenants",
    "Who asks for how much, and whose quota is full.",
    [Row("Now", _tiles()), Row("Over time", _rates()), Row("Totals", _totals())],
    [*PODS, TENANT],
)
