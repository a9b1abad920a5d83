"""How many CPU cores this process may use: the control group's quota counts, not what the host has."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = CGROUP_ROOT) -> int:
    """Whole cores, at least 1: the lesser of the CPU affinity and the quota of the control group (v2 or v1)."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_v2(root) or _quota_v1(root)
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def _quota_v2(root: Path) -> float | None:
    """Cores granted by cpu.max, which reads "QUOTA PERIOD" in microseconds or "max PERIOD"."""
    fields = _read(root / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(root: Path) -> float | None:
    """Cores granted by cpu.cfs_quota_us, which is -1 without a limit."""
    quota, period = (_read(root / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
