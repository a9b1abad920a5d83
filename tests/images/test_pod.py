"""The chart's pod can be played by podman: `make image-test` does it, this sees that the chart and it still fit."""

from __future__ import annotations

import itertools
from pathlib import Path

import yaml

from tests.helm.tools import CHART, helm
from tests.images.pod import deployment_of, playable, pre_stop_of


def test_the_rendered_pod_is_made_playable(tmp_path: Path) -> None:
    done = helm("template", "octavo", CHART, home=tmp_path)
    assert done.returncode == 0, done.stderr
    deployment = deployment_of([each for each in yaml.safe_load_all(done.stdout) if each])
    numbers = itertools.count(40_000)
    pod, ports = playable(deployment, "test", lambda: next(numbers))

    boxes = pod["spec"]["containers"]
    assert [each["name"] for each in boxes] == ["kv-manager", "model-runner"]
    assert set(ports) == {9401, 9402, 50051, 50052, 50053}
    assert sorted(ports.values()) == list(range(40_000, 40_005))
    said = [argument for each in boxes for argument in each["args"]]
    assert not [argument for argument in said if "0.0.0.0" in argument]
    assert f"--runner-address=127.0.0.1:{ports[50051]}" in said
    mounted = {each["name"] for box in boxes for each in box["volumeMounts"]}
    assert mounted <= {each["name"] for each in pod["spec"]["volumes"]}
    assert all(each["securityContext"]["readOnlyRootFilesystem"] for each in boxes)
    assert pre_stop_of(deployment)[:2] == ["octavo", "drain"]
