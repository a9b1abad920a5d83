"""The chart's pod as processes, by the command lines and probes that it renders, from its start to its end.

A client that does not read keeps its stream in progress for as long as a test wants.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.client import Client, OctavoError, generate_request
from services.client_retry import NO_RETRIES
from services.errors import describe_rpc_error
from services.runner_wire import read_chunk
from tests.e2e.stack import NOT_SERVING, PATIENCE_SECONDS, wait_until
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.helm.kubelet import Given, Kubelet
from tests.helm.manifests import NAMESPACE, Manifests, render
from tests.services.silent_client import Silent

Json = dict[str, Any]
PROMPT = list(b"Once upon a time")
TOKENS = 200
SLOW = generate_request(PROMPT, request_id="slow", max_tokens=TOKENS, ignore_eos=True, logprobs=100)
LONG_GRACE = 1000
"""Seconds for the whole end of a pod: more than any test waits, so that a slow machine kills nothing."""


def values(**termination: int) -> Json:
    """A small model in a claim, and how the pod ends."""
    return {
        "model": {"source": "pvc", "path": "tiny", "pvc": {"existingClaim": "weights"}},
        "runner": {"settings": {"maxUnreadTokens": 1, "numBlocks": 512}},
        "termination": {"gracePeriodSeconds": LONG_GRACE} | termination,
    }


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("weights")
    write_tiny_chat_model(directory / "tiny")
    return directory


@contextmanager
def running(directory: Path, given: Given, **termination: int) -> Iterator[tuple[Kubelet, Manifests]]:
    """The rendered pod, once it is ready."""
    manifests = render(directory, values(**termination))
    [pod] = manifests.octavo_pods
    with Kubelet(pod, directory, given) as kubelet:
        kubelet.start()
        yield kubelet, manifests


@contextmanager
def being_deleted(kubelet: Kubelet) -> Iterator[dict[str, int]]:
    """The pod's end, in a thread; the exit codes are there when the block is over."""
    codes: dict[str, int] = {}
    thread = threading.Thread(target=lambda: codes.update(kubelet.delete()))
    thread.start()
    try:
        yield codes
    finally:
        thread.join(PATIENCE_SECONDS)


def unready(kubelet: Kubelet) -> bool:
    return kubelet["model-runner"].probe("readinessProbe") == NOT_SERVING


def refused(client: Client) -> bool:
    """Whether a new request is told to go elsewhere; it is answered whole when not."""
    try:
        answer = list(client.generate(PROMPT, max_tokens=3, ignore_eos=True))
    except OctavoError as error:
        if (error.code, error.reason) != ("UNAVAILABLE", "STOPPING"):
            raise
        return True
    assert len(tokens_of(answer)) == 3
    return False


def tokens_of(chunks: Any) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_a_pod_starts_in_order_serves_and_is_drained_with_a_live_stream(tmp_path: Path, weights: Path) -> None:
    given = Given(claims={"weights": weights})
    with running(tmp_path, given, lameDuckSeconds=0, drainSeconds=600) as (kubelet, _):
        assert kubelet.events == [
            "kv-manager started",
            "kv-manager startupProbe",
            "model-runner started",
            "model-runner startupProbe",
        ]
        address = kubelet.address("grpc")
        with Client(address, retry=NO_RETRIES, timeout=PATIENCE_SECONDS) as client:
            expected = tokens_of(client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True))
            assert len(expected) == TOKENS
            with Silent(address, SLOW, timeout=PATIENCE_SECONDS) as slow:
                wait_until("the stream", lambda: [each.request_id for each in client.requests()] == ["slow"])
                with being_deleted(kubelet) as codes:
                    wait_until("NOT_SERVING", lambda: unready(kubelet))
                    wait_until("the refusal", lambda: refused(client))
                    # Busy with the rest of the stream, and alive: no probe restarts it.
                    assert kubelet.is_alive()
                    assert not kubelet.is_ready()
                    assert kubelet.events[4:] == ["model-runner preStop"]
                    assert [each.request_id for each in client.requests()] == ["slow"]
                    assert tokens_of(map(read_chunk, slow.call)) == expected
        assert codes == {"kv-manager": 0, "model-runner": 0}
        assert kubelet.events[4:] == [
            "model-runner preStop",
            "model-runner preStop exited 0",
            "model-runner SIGTERM",
            "model-runner exited 0",
            "kv-manager SIGTERM",
            "kv-manager exited 0",
        ]
        assert kubelet.hooks[0].startswith("Drained: 1 request finished in ")
        assert list((tmp_path / "run").iterdir()) == []


def test_the_chart_s_own_test_streams_a_token_and_a_killed_kv_manager_comes_back(tmp_path: Path, weights: Path) -> None:
    given = Given(claims={"weights": weights})
    with running(tmp_path, given, lameDuckSeconds=0, drainSeconds=1, graceSeconds=1) as (kubelet, manifests):
        address = kubelet.address("grpc")
        [hook] = [pod for pod in manifests.pods if pod.is_test]
        there = Given(services={f"demo-octavo.{NAMESPACE}.svc:50051": address})
        (tmp_path / "test").mkdir()
        with Kubelet(hook, tmp_path / "test", there) as test:
            assert test.complete()

        with Client(address, timeout=PATIENCE_SECONDS) as client, Silent(address, SLOW, PATIENCE_SECONDS) as slow:
            wait_until("the stream", lambda: [each.request_id for each in client.requests()] == ["slow"])
            process = kubelet["kv-manager"].process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            wait_until("NOT_SERVING", lambda: unready(kubelet))
            assert kubelet["model-runner"].passes("livenessProbe")
            kubelet.restart("kv-manager")
            wait_until("readiness", kubelet.is_ready)
            assert not refused(client)

            # What is late after the drain and the grace time ends, and the pod with it.
            with being_deleted(kubelet) as codes:
                wait_until("the runner's end", lambda: "model-runner exited 0" in kubelet.events)
                with pytest.raises(grpc.RpcError) as caught:
                    list(slow.call)
                assert describe_rpc_error(caught.value).code == "UNAVAILABLE"
        assert codes == {"kv-manager": 0, "model-runner": 0}
        assert kubelet.hooks[0].startswith("Not drained: ")
        assert "and 1 request is left; the time is over." in kubelet.hooks[0]


def test_a_lame_duck_still_serves(tmp_path: Path, weights: Path) -> None:
    given = Given(claims={"weights": weights})
    with (
        running(tmp_path, given, lameDuckSeconds=900, drainSeconds=1) as (kubelet, _),
        Client(kubelet.address("grpc"), retry=NO_RETRIES, timeout=PATIENCE_SECONDS) as client,
        being_deleted(kubelet),
    ):
        wait_until("NOT_SERVING", lambda: unready(kubelet))
        assert not refused(client)
        assert kubelet.events[-1] == "model-runner preStop"
        # As a forced deletion: nobody waits 900 seconds.
        kubelet.kill()
