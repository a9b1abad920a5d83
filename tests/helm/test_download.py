"""The init container that downloads weights, run as the chart renders it, against a Hub on this machine."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.helm.manifests import Json, render

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00001.safetensors": bytes(range(256)) * 64,
    "tokenizer.json": b"{}",
    "original/consolidated.00.pth": b"the same once more",
    "README.md": b"# A model",
}
TOKEN = "hub-token-of-the-test"


@dataclass
class Hub:
    """As much of the Hugging Face Hub as a download needs, with one repository that asks for a token."""

    paths: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    url: str = ""

    @classmethod
    def start(cls) -> tuple[Hub, ThreadingHTTPServer]:
        hub = cls()
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return hub, server


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.paths.append(path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.hub.refused.append(path)
            self._answer(401, b"")
        elif path.startswith(f"/api/models/org/name/tree/{COMMIT}"):
            self._answer(200, json.dumps([_entry(name) for name in FILES]).encode())
        elif path == "/api/models/org/name/revision/v1":
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(200, json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            content = FILES[path.removeprefix(f"/org/name/resolve/{COMMIT}/")]
            self._answer(200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer(404, b"")

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _entry(name: str) -> Json:
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": _digest(FILES[name])}


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub, server = Hub.start()
    yield hub
    server.shutdown()
    server.server_close()


def download(tmp_path: Path, hub: Hub, token: str | None) -> subprocess.CompletedProcess[str]:
    """Runs the container's command, with /models and /tmp in the test's directory."""
    chosen: Json = {"repository": "org/name", "revision": "v1", "endpoint": hub.url}
    if token:
        chosen["token"] = {"secretName": "hub"}
    (pod,) = render(tmp_path, {"model": {"source": "download", "download": chosen}}).octavo_pods
    container = pod.container("download")

    def placed(text: str) -> str:
        return text.replace("/models", str(tmp_path / "models"))

    program, *rest = [placed(word) for word in container["command"] + container["args"]]
    env = {each["name"]: placed(each["value"]) for each in container["env"] if "value" in each}
    if token:
        assert [each["name"] for each in container["env"] if "valueFrom" in each] == ["HF_TOKEN"]
        env["HF_TOKEN"] = token
    path = str(Path(sys.executable).parent / program)
    return subprocess.run(
        [path, *rest], env=env | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False
    )


def test_it_fetches_what_the_patterns_name_and_no_more(tmp_path: Path, hub: Hub) -> None:
    done = download(tmp_path, hub, TOKEN)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "org" / "name"
    there = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert there == {name: FILES[name] for name in FILES if "/" not in name and name != "README.md"}
    assert not (folder / "original").exists()
    assert TOKEN not in done.stdout + done.stderr


def test_a_second_start_fetches_no_file_again(tmp_path: Path, hub: Hub) -> None:
    assert download(tmp_path, hub, TOKEN).returncode == 0
    hub.paths.clear()
    assert download(tmp_path, hub, TOKEN).returncode == 0
    assert not [path for path in hub.paths if path.endswith(".safetensors")]


def test_without_a_token_it_fails_and_the_pod_does_not_start(tmp_path: Path, hub: Hub) -> None:
    done = download(tmp_path, hub, None)
    assert done.returncode != 0
    assert "/api/models/org/name/revision/v1" in hub.refused
    assert not (tmp_path / "models" / "org" / "name" / "config.json").exists()
