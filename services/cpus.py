"""How many CPU cores this process may use: the control group's quota counts, not what the host has."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
"""A line for each hierarchy: NUMBER:CONTROLLERS:PATH; number 0 without controllers is version 2 (man 7 cgroups)."""


def usable_cpus(root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Whole cores, at least 1: the least of the CPU affinity and the quotas of the control group (v2 or v1).

    The quotas of all groups around it bind as well. A container sees its own group as the root of all.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in _quotas(root, _read(membership).splitlines()) if quota is not None]
    return max(1, min([allowed, *map(math.ceil, quotas)]))


def _quotas(root: Path, memberships: Iterable[str]) -> Iterator[float | None]:
    """Cores granted to the group of this process, to those around it, and to whatever is at the root."""
    lines = [line.split(":", 2) for line in memberships if line.count(":") >= 2]
    for group in _groups(root, next((path for _, controllers, path in lines if not controllers), "")):
        yield _quota_v2(group)
    for group in _groups(root / "cpu", next((path for _, names, path in lines if "cpu" in names.split(",")), "")):
        yield _quota_v1(group)


def _groups(root: Path, path: str) -> Iterator[Path]:
    """The folder of the group `path`, and of each around it. Beyond the root (../) there is nothing to be seen."""
    names = [name for name in path.split("/") if name]
    for depth in range(0 if ".." in names else len(names), -1, -1):
        yield root.joinpath(*names[:depth])


def _quota_v2(group: Path) -> float | None:
    """Cores granted by cpu.max, which reads "QUOTA PERIOD" in microseconds or "max PERIOD"."""
    fields = _read(group / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(group: Path) -> float | None:
    """Cores granted by cpu.cfs_quota_us, which is -1 without a limit."""
    quota, period = (_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
