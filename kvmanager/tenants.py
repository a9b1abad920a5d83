"""What each tenant occupies, and the quota that keeps it from flushing the others.

A tenant is who uses a salt; blocks under a salt are never shared with another, so each tenant's cached blocks are
trees of their own and can be given up for it alone.
"""

from __future__ import annotations

from typing import Final

from kvmanager.victims import Victims

_FEW: Final = 64


class Tenant:
    """Blocks of one salt. used: held and cached; cached: of them the cached ones; pinned: of those the pinned ones.

    quota: blocks it may occupy, 0 without a limit. victims: its own candidates, kept only under a quota.
    """

    __slots__ = ("cached", "pinned", "quota", "salt", "used", "victims")

    def __init__(self, salt: str, quota: int) -> None:
        self.salt = salt
        self.quota = quota
        self.used = 0
        self.cached = 0
        self.pinned = 0
        self.victims: Victims | None = Victims() if quota else None

    @property
    def held(self) -> int:
        return self.used - self.cached

    @property
    def room(self) -> int:
        """Blocks that it may still take when it gives up all that it may; only under a quota."""
        return self.quota - self.held - self.pinned

    def over_quota(self, count: int) -> int:
        """How many of its cached blocks must go before it takes `count` blocks."""
        return max(0, self.used + count - self.quota) if self.quota else 0


class Tenants:
    """The tenants that have blocks or a quota of their own, by salt; `of_block` knows the blocks of salted ones."""

    __slots__ = ("_by_salt", "_quotas", "_sweep_at", "base", "default_quota", "of_block")

    def __init__(self) -> None:
        self.base = Tenant("", 0)
        self.of_block: dict[int, Tenant] = {}
        self.default_quota = 0
        self._by_salt: dict[str, Tenant] = {}
        self._quotas: dict[str, int] = {}
        self._sweep_at = _FEW

    def tenant(self, salt: str) -> Tenant:
        """The tenant of a salt; the base tenant for none."""
        if not salt:
            return self.base
        known = self._by_salt.get(salt)
        if known is None:
            self._sweep()
            known = self._by_salt[salt] = Tenant(salt, self.quota(salt))
        return known

    def find(self, salt: str) -> Tenant | None:
        """The tenant of a salt that has blocks or did lately."""
        return self._by_salt.get(salt) if salt else self.base

    def owner(self, block: int) -> Tenant:
        """Whose block it is, of one that is held or cached."""
        return self.of_block.get(block, self.base) if self.of_block else self.base

    def quota(self, salt: str) -> int:
        """The quota of a salt, in blocks; 0 is no limit."""
        return self._quotas.get(salt, self.default_quota if salt else 0)

    def set_quota(self, salt: str, blocks: int) -> Tenant:
        """Gives a salt a quota of its own; it counts from the next verb on."""
        self._quotas[salt] = blocks
        tenant = self.tenant(salt)
        tenant.quota = blocks
        return tenant

    def set_default(self, blocks: int) -> list[Tenant]:
        """The quota of every salt that has none of its own. Returns the tenants that it now counts for."""
        self.default_quota = blocks
        changed = [tenant for salt, tenant in self._by_salt.items() if salt not in self._quotas]
        for tenant in changed:
            tenant.quota = blocks
        return changed

    def everyone(self) -> list[Tenant]:
        """The base tenant and those that have blocks or were asked about."""
        return [self.base, *self._by_salt.values()]

    def _sweep(self) -> None:
        """Forgets the tenants without blocks now and then, so that salts that come and go leave nothing behind."""
        if len(self._by_salt) >= self._sweep_at:
            self._by_salt = {salt: tenant for salt, tenant in self._by_salt.items() if tenant.used}
            self._sweep_at = 2 * len(self._by_salt) + _FEW
