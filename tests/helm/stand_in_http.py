"""The stand-in API over HTTP on loopback, with a kubeconfig that leads there."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.helm import stand_in_protobuf
from tests.helm.stand_in_api import ApiError, Request, StandInApi
from tests.helm.stand_in_resources import Resource
from tests.helm.stand_in_store import Store

Json = dict[str, Any]
WATCH_SECONDS = 30
POD_LOG = "Nothing ran: the stand-in API has no kubelet.\n"


@contextmanager
def serving(api: StandInApi, directory: Path) -> Iterator[Path]:
    """Serves while the block runs; gives a kubeconfig in `directory`."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.api = api
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield _write_kubeconfig(directory, f"http://127.0.0.1:{server.server_address[1]}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _write_kubeconfig(directory: Path, url: str) -> Path:
    context = {"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "contexts": [context],
        "users": [{"name": "u", "user": {"token": "none"}}],
        "current-context": "c",
    }
    path = directory / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    api: StandInApi


class _Handler(BaseHTTPRequestHandler):
    """HTTP to `StandInApi`."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        api = self.server.api
        api.requests.append(f"{self.command} {self.path}")
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._answer(api, raw)
        except ApiError as error:
            self._send(error.code, error.status())

    def _answer(self, api: StandInApi, raw: bytes) -> None:
        url = urlsplit(self.path)
        parts = [part for part in url.path.split("/") if part]
        prefixes = {each.prefix for each in api.resources}
        if parts[0] not in ("api", "apis") or len(parts) == 1 or "/".join(parts) in prefixes:
            self._send(200, api.describe(parts))
            return
        body = stand_in_protobuf.decode(raw) if raw.startswith(stand_in_protobuf.MAGIC) else yaml.safe_load(raw or "{}")
        query = dict(parse_qsl(url.query))
        request = Request(
            self.command, *api.find(parts), query=query, content_type=self.headers.get("Content-Type", ""), body=body
        )
        if request.method == "GET" and request.name is None and query.get("watch") in ("1", "true"):
            self._stream(api.store, request)
        elif request.part == "log":
            self._send_bytes(200, POD_LOG.encode(), "text/plain")
        else:
            code, answer, warnings = api.answer(request)
            self._send(code, answer, warnings)

    def _stream(self, store: Store, request: Request) -> None:
        wants_bookmark = request.query.get("sendInitialEvents") == "true"
        version = int(request.query.get("resourceVersion") or 0)
        after = None if wants_bookmark or not version else version
        deadline = time.monotonic() + min(float(request.query.get("timeoutSeconds", WATCH_SECONDS)), WATCH_SECONDS)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with store.watch(request.selection, after) as watch:
            if wants_bookmark:
                watch.events.put(("BOOKMARK", _bookmark(request.resource, store.version)))
            try:
                while time.monotonic() < deadline:
                    try:
                        kind, item = watch.events.get(timeout=0.2)
                    except queue.Empty:
                        continue
                    self._chunk(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                self._chunk(b"")
            except OSError:
                self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, code: int, answer: Json, warnings: Sequence[str] = ()) -> None:
        self._send_bytes(code, json.dumps(answer).encode(), "application/json", warnings)

    def _send_bytes(self, code: int, data: bytes, content_type: str, warnings: Sequence[str] = ()) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        for warning in warnings:
            self.send_header("Warning", f"299 - {json.dumps(warning)}")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve


def _bookmark(resource: Resource, version: int) -> Json:
    metadata = {"resourceVersion": str(version), "annotations": {"k8s.io/initial-events-end": "true"}}
    return {"kind": resource.kind, "apiVersion": resource.group_version, "metadata": metadata}
