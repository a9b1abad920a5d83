"""Names of tenants as label values of metrics: a bounded number, whatever clients send."""

from __future__ import annotations

MAX_TENANTS = 100
"""Names that get series of their own: those that come first."""
OTHER = "other"
"""Stands for all further ones."""


class TenantLabels:
    """Those who give no name are one tenant, whose name is empty."""

    def __init__(self, most: int = MAX_TENANTS) -> None:
        self._most = most
        self._known = {""}

    def label(self, tenant: str) -> str:
        """The label value for a tenant; it never changes."""
        if tenant not in self._known:
            if len(self._known) > self._most:
                return OTHER
            self._known.add(tenant)
        return tenant
