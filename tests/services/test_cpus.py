"""Usable cores from control groups made of files: the quota bounds the affinity, and the affinity the quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.cpus import usable_cpus

AFFINITY = 8


@pytest.fixture(autouse=True)
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on 8 cores, whatever machine the test runs on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(AFFINITY)), raising=False)


def write_v2(root: Path, text: str) -> None:
    (root / "cpu.max").write_text(text)


def write_v1(root: Path, quota: str, period: str) -> None:
    (root / "cpu").mkdir()
    (root / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (root / "cpu" / "cpu.cfs_period_us").write_text(period)


class TestVersion2:
    @pytest.mark.parametrize(
        ("text", "cores"),
        [
            pytest.param("max 100000\n", AFFINITY, id="no limit"),
            pytest.param("150000 100000\n", 2, id="1.5 cores are 2"),
            pytest.param("200000 100000\n", 2, id="2 cores"),
            pytest.param("200001 100000\n", 3, id="a little more than 2"),
            pytest.param("10000 100000\n", 1, id="a tenth"),
            pytest.param("25000 50000\n", 1, id="half of another period"),
            pytest.param("800000 100000\n", AFFINITY, id="as many as the affinity"),
            pytest.param("6400000 100000\n", AFFINITY, id="more than the affinity"),
        ],
    )
    def test_quota(self, tmp_path: Path, text: str, cores: int) -> None:
        write_v2(tmp_path, text)
        assert usable_cpus(tmp_path) == cores

    @pytest.mark.parametrize("text", ["", "\n", "max", "100000"])
    def test_a_file_that_says_nothing_is_no_limit(self, tmp_path: Path, text: str) -> None:
        write_v2(tmp_path, text)
        assert usable_cpus(tmp_path) == AFFINITY


class TestVersion1:
    @pytest.mark.parametrize(
        ("quota", "cores"),
        [
            pytest.param("-1\n", AFFINITY, id="no limit"),
            pytest.param("50000\n", 1, id="half a core"),
            pytest.param("100000\n", 1, id="1 core"),
            pytest.param("350000\n", 4, id="3.5 cores are 4"),
            pytest.param("6400000\n", AFFINITY, id="more than the affinity"),
        ],
    )
    def test_quota(self, tmp_path: Path, quota: str, cores: int) -> None:
        write_v1(tmp_path, quota, "100000\n")
        assert usable_cpus(tmp_path) == cores

    def test_a_quota_without_a_period_is_no_limit(self, tmp_path: Path) -> None:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("50000\n")
        assert usable_cpus(tmp_path) == AFFINITY


class TestGroupsInGroups:
    """A service of systemd, or a container that shares the host's view, has its quota in a folder below the root."""

    @pytest.mark.parametrize(
        ("quotas", "cores"),
        [
            pytest.param({"a.slice/b.service": "300000 100000"}, 3, id="its own"),
            pytest.param({"a.slice": "200000 100000"}, 2, id="of the one around it"),
            pytest.param({"a.slice": "200000 100000", "a.slice/b.service": "500000 100000"}, 2, id="the least of all"),
            pytest.param({"a.slice": "max 100000", "a.slice/b.service": "150000 100000"}, 2, id="one without a limit"),
            pytest.param({"other.slice": "100000 100000"}, AFFINITY, id="of others"),
            pytest.param({".": "400000 100000"}, 4, id="a container that sees itself as the root"),
        ],
    )
    def test_version_2(self, tmp_path: Path, quotas: dict[str, str], cores: int) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("0::/a.slice/b.service\n")
        for group, quota in quotas.items():
            (root / group).mkdir(parents=True, exist_ok=True)
            write_v2(root / group, quota)
        assert usable_cpus(root, membership) == cores

    def test_version_1(self, tmp_path: Path) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("4:cpuset:/elsewhere\n3:cpu,cpuacct:/docker/c1\n0::/\n")
        for group, quota in (("docker/c1", 250000), ("elsewhere", 100000)):
            (root / "cpu" / group).mkdir(parents=True)
            (root / "cpu" / group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (root / "cpu" / group / "cpu.cfs_period_us").write_text("100000\n")
        assert usable_cpus(root, membership) == 3

    def test_a_group_beyond_the_root(self, tmp_path: Path) -> None:
        """As the kernel writes it for a process that was moved out of the group that it sees as the root."""
        root, membership = tmp_path / "cgroup", tmp_path / "membership"
        membership.write_text("0::/../b.service\n")
        root.mkdir()
        write_v2(root, "200000 100000")
        write_v2(tmp_path, "100000 100000")
        assert usable_cpus(root, membership) == 2


class TestWithoutControlGroups:
    def test_no_files(self, tmp_path: Path) -> None:
        assert usable_cpus(tmp_path) == AFFINITY

    def test_no_folder(self, tmp_path: Path) -> None:
        assert usable_cpus(tmp_path / "missing") == AFFINITY

    def test_without_affinity_all_cores_of_the_machine_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not every system has sched_getaffinity."""
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: 12)
        assert usable_cpus(tmp_path) == 12

    def test_at_least_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: None)
        assert usable_cpus(tmp_path) == 1

    def test_this_machine(self) -> None:
        """The real control group, whichever it is: between one core and the affinity."""
        assert 1 <= usable_cpus() <= AFFINITY
