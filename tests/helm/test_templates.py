"""What the chart makes of its pods: how they begin and end, their command lines, where the weights come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helm.values_schema import values_schema
from tests.helm.chart_values import arguments, nested, server, values
from tests.helm.manifests import Json, Pod, RefusedValues, render
from tests.helm.tools import CHART


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helm")


def test_the_kv_manager_is_a_native_sidecar_that_the_runner_waits_for(home: Path) -> None:
    pod = server(render(home))
    (sidecar,) = pod.spec["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("kv-manager", "Always")
    assert sidecar["startupProbe"]["grpc"] == {"port": 50053, "service": "readiness"}
    assert [each["name"] for each in pod.spec["containers"]] == ["model-runner"]


def test_both_meet_on_one_socket_in_memory(home: Path) -> None:
    pod = server(render(home))
    for name in ("kv-manager", "model-runner"):
        assert "--kv-address=unix:/run/octavo/kv.sock" in arguments(pod, name)
        mounts = {each["mountPath"]: each["name"] for each in pod.container(name)["volumeMounts"]}
        assert mounts["/run/octavo"] == "run"
    volumes = {each["name"]: each for each in pod.spec["volumes"]}
    assert volumes["run"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Mi"}


def test_the_grace_period_exceeds_all_phases_of_the_end(home: Path) -> None:
    phases = {"lameDuckSeconds": 7, "drainSeconds": 100, "graceSeconds": 11, "kvGraceSeconds": 3}
    pod = server(render(home, {"termination": phases}))
    assert pod.spec["terminationGracePeriodSeconds"] == 7 + 100 + 11 + 3 + 15
    assert "--grace-seconds=11" in arguments(pod)
    assert "--grace-seconds=3" in arguments(pod, "kv-manager")
    assert pod.container("model-runner")["lifecycle"]["preStop"]["exec"]["command"] == [
        *("octavo", "drain", "--admin-address=unix:/run/octavo/admin.sock"),
        *("--lame-duck-seconds=7", "--drain-seconds=100"),
    ]


@pytest.mark.parametrize(("seconds", "fits"), [(140, False), (141, True)])
def test_a_grace_period_of_ones_own_must_be_greater(home: Path, seconds: int, fits: bool) -> None:
    given = nested("termination.gracePeriodSeconds", seconds)
    if fits:
        assert server(render(home, given)).spec["terminationGracePeriodSeconds"] == seconds
    else:
        with pytest.raises(RefusedValues, match=r"is 140, but lame duck, drain and both graces take 140: set more"):
            render(home, given)


@pytest.mark.parametrize(("seconds", "period", "failures"), [(600, 5, 120), (601, 5, 121), (1, 10, 1), (1800, 7, 258)])
def test_the_startup_probe_may_fail_for_the_seconds_of_a_start(
    home: Path, seconds: int, period: int, failures: int
) -> None:
    given = values(runner__startupSeconds=seconds, runner__startupProbe={"periodSeconds": period})
    probe = server(render(home, given)).container("model-runner")["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (period, failures)
    assert probe["grpc"] == {"port": 50052, "service": "readiness"}


def test_a_rollout_of_pods_with_one_gpu_does_not_wait_for_a_second(home: Path) -> None:
    (deployment,) = render(home, {}, CHART / "values-gpu.yaml").of_kind("Deployment")
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    (deployment,) = render(home, {"strategy": {"type": "Recreate", "rollingUpdate": None}}).of_kind("Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_servers_can_listen_by_ipv6(home: Path) -> None:
    manifests = render(home, values(bindAddress="::", gateway__enabled=True))
    pod = server(manifests)
    assert {"--runner-address=[::]:50051", "--runner-health-address=[::]:50052"} <= set(arguments(pod))
    assert "--vllm-address=[::]:50054" in arguments(pod)
    assert {"--kv-metrics-address=[::]:9401", "--kv-health-address=[::]:50053"} <= set(arguments(pod, "kv-manager"))
    (gateway,) = [each for each in manifests.pods if each.containers[0]["name"] == "smg"]
    assert {"--host=::", "--prometheus-host=::"} <= set(gateway.containers[0]["args"])
    assert "0.0.0.0" not in str(manifests.pods)


def test_a_service_by_our_name_sets_no_setting_of_ours(home: Path) -> None:
    pods = render(home, nested("gateway.enabled", True)).pods
    assert len(pods) >= 3
    assert {pod.spec["enableServiceLinks"] for pod in pods} == {False}


# --- Settings and environment


def test_settings_become_options(home: Path) -> None:
    given = {"kvCacheMemory": "8GiB", "maxQueuedTokens": 4194304, "gpuMemoryUtilization": 0.85, "slowReaderSeconds": 90}
    given |= {"cudaGraphs": True, "reflection": False, "maxConnectionAgeSeconds": None}
    args = arguments(server(render(home, nested("runner.settings", given))))
    assert args[-6:] == [
        *("--cuda-graphs", "--gpu-memory-utilization=0.85", "--kv-cache-memory=8GiB"),
        *("--max-queued-tokens=4194304", "--no-reflection", "--slow-reader-seconds=90"),
    ]


def test_arguments_come_last_so_that_they_count(home: Path) -> None:
    given = values(runner__settings={"blockSize": 32}, runner__args=["--block-size=64"])
    assert arguments(server(render(home, given)))[-2:] == ["--max-connection-age-seconds=1800", "--block-size=64"]


@pytest.mark.parametrize(
    ("cpu", "threads"), [("2", 2), (3, 3), ("1500m", 2), ("250m", 1), (0.5, 1), ("8000m", 8), (None, None)]
)
def test_the_model_has_a_thread_for_each_cpu_that_is_requested(home: Path, cpu: Any, threads: int | None) -> None:
    args = arguments(server(render(home, nested("runner.resources.requests.cpu", cpu))))
    given = [arg for arg in args if arg.startswith("--num-threads")]
    assert given == ([] if threads is None else [f"--num-threads={threads}"])


def test_the_settings_can_say_the_threads(home: Path) -> None:
    args = arguments(server(render(home, nested("runner.settings.numThreads", 3))))
    assert [arg for arg in args if arg.startswith("--num-threads")] == ["--num-threads=3"]


def test_no_limit_of_storage_counts_the_weights_that_a_pod_fetches(home: Path) -> None:
    given = values(model__source="download", model__download={"repository": "org/name"})
    pod = server(render(home, given))
    assert len(pod.containers) == 3
    assert not any("ephemeral-storage" in each["resources"]["limits"] for each in pod.containers)


def test_kernels_that_are_compiled_at_run_time_have_a_place(home: Path) -> None:
    """The root is read-only: FlashInfer's import writes, and so does Triton's first launch."""
    pod = server(render(home))
    container = pod.container("model-runner")
    assert container["securityContext"]["readOnlyRootFilesystem"]
    volumes = {each["name"] for each in pod.spec["volumes"] if "emptyDir" in each}
    writable = {
        each["mountPath"] for each in container["volumeMounts"] if each["name"] in volumes and not each.get("readOnly")
    }
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    for name in ("FLASHINFER_WORKSPACE_BASE", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME", "HOME"):
        place = Path(environment[name])
        assert any(place.is_relative_to(each) for each in writable), (name, place)


def test_environment_has_values_of_any_kind_and_references(home: Path) -> None:
    reference = {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    given = {"PLAIN": "a b", "NUMBER": 1000000, "FLAG": True, "NODE": reference}
    env = server(render(home, nested("runner.env", given))).container("model-runner")["env"]
    assert env[-4:] == [
        {"name": "FLAG", "value": "true"},
        {"name": "NODE", **reference},
        {"name": "NUMBER", "value": "1000000"},
        {"name": "PLAIN", "value": "a b"},
    ]


def test_every_setting_that_the_schema_has_is_an_option_under_its_name(home: Path) -> None:
    definitions = values_schema()["definitions"]
    chosen = {name: _sample(schema) for name, schema in definitions["runnerSettings"]["properties"].items()}
    args = arguments(server(render(home, nested("runner.settings", chosen))))
    for name in chosen:
        option = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)
        assert any(arg.split("=")[0] == f"--{option}" for arg in args), name


def _sample(schema: Json) -> Any:
    return schema["enum"][0] if "enum" in schema else True if schema["type"] == "boolean" else 1


# --- Where the weights come from


def model_volume(pod: Pod) -> Json | None:
    return next((each for each in pod.spec["volumes"] if each["name"] == "model"), None)


def test_the_demo_model_needs_neither_option_nor_volume(home: Path) -> None:
    pod = server(render(home))
    assert not any(arg.startswith("--model=") for arg in arguments(pod))
    assert model_volume(pod) is None


def test_a_path_is_handed_on(home: Path) -> None:
    pod = server(render(home, values(model__source="path", model__path="/data/m.gguf", model__name="mine")))
    assert {"--model=/data/m.gguf", "--model-name=mine"} <= set(arguments(pod))


def test_a_claim_is_mounted_for_reading(home: Path) -> None:
    given = values(model__source="pvc", model__path="qwen", model__pvc__existingClaim="weights")
    pod = server(render(home, given))
    assert "--model=/models/qwen" in arguments(pod)
    assert model_volume(pod) == {"name": "model", "persistentVolumeClaim": {"claimName": "weights"}}
    mounts = pod.container("model-runner")["volumeMounts"]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in mounts


def test_a_download_runs_before_the_services_and_may_write(home: Path) -> None:
    download = {"repository": "org/name", "revision": "abc123", "token": {"secretName": "hub"}}
    pod = server(render(home, values(model__source="download", model__download=download)))
    first, second = pod.spec["initContainers"]
    assert (first["name"], second["name"]) == ("download", "kv-manager")
    assert first["command"] + first["args"][:4] == [
        *("hf", "download", "org/name", "--revision=abc123", "--local-dir=/models/org/name")
    ]
    assert {"name": "model", "mountPath": "/models"} in first["volumeMounts"]
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in first["env"]
    assert not any(each["name"] == "HF_TOKEN" for each in pod.container("model-runner")["env"])
    assert "--model=/models/org/name" in arguments(pod)
    assert model_volume(pod) == {"name": "model", "emptyDir": {"sizeLimit": "50Gi"}}


def test_a_download_can_be_kept_in_a_claim_of_the_chart(home: Path) -> None:
    download = {"repository": "org/name-GGUF", "include": ["*Q4_K_M.gguf"]}
    given = values(model__source="download", model__download=download, model__path="name-Q4_K_M.gguf")
    given["model"]["pvc"] = {"create": True, "size": "20Gi", "storageClassName": "fast"}
    manifests = render(home, given)
    (claim,) = manifests.of_kind("PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    pod = server(manifests)
    name = claim["metadata"]["name"]
    assert model_volume(pod) == {"name": "model", "persistentVolumeClaim": {"claimName": name}}
    assert "--model=/models/org/name-GGUF/name-Q4_K_M.gguf" in arguments(pod)


def test_an_image_is_a_volume_from_kubernetes_1_33_on(home: Path) -> None:
    given = values(model__source="image", model__image__reference="registry.example/weights:1", model__path="/m/")
    pod = server(render(home, given, kubernetes="1.33"))
    image = {"reference": "registry.example/weights:1", "pullPolicy": "IfNotPresent"}
    assert model_volume(pod) == {"name": "model", "image": image}
    assert "--model=/models/m" in arguments(pod)
    with pytest.raises(RefusedValues, match=r"model\.source=image needs Kubernetes 1\.33 or newer, this is v1\.29\.0"):
        render(home, given, kubernetes="1.29")
