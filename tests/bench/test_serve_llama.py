"""llama.cpp's server is driven as its protocol says: a stand-in for the program that answers as the server does."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from bench.serve import llama_system
from bench.serve.workloads import Conversation, Turn, Workload

SERVER = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    print("version: 77 (abc)")
    sys.exit()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["stream"] and asked["return_tokens"] and asked["ignore_eos"]
        self.send_response(200)
        self.end_headers()
        first, count = asked["prompt"][0], asked["n_predict"]
        # The second token ends inside a character: no event is sent for it.
        events = [([first + i], i + 1) for i in range(count) if i != 1]
        for tokens, predicted in [([], 0), *events, ([], count)]:
            event = {{"tokens": tokens, "tokens_predicted": predicted}}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")

    def log_message(self, *_):
        pass

slots = sys.argv[sys.argv.index("-np") + 1], sys.argv[sys.argv.index("-c") + 1]
print(*slots, file=open(sys.argv[0] + ".slots", "w"))
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(SERVER)
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(("cache_tokens", "slots"), [(0, "16 16384"), (4096, "4 4096")])
def test_streams_of_the_server(server: Path, cache_tokens: int, slots: str) -> None:
    workload = Workload("A", (Conversation((Turn((100, 7), 4),)), Conversation((Turn((200,), 3),))), cache_tokens)

    async def run() -> tuple[dict[str, str], list[tuple[int, ...]]]:
        options = {"server": str(server), "model": "model.gguf", "cache_tokens": cache_tokens}
        system = await llama_system.create(options)
        run = await system.run(workload)
        await system.close()
        return system.versions, [answer.token_ids for answer in run.answers]

    versions, answers = asyncio.run(run())
    assert versions == {"llama.cpp": "version: 77 (abc)"}
    assert answers == [(100, 0, 102, 103), (200, 0, 202)]
    assert Path(f"{server}.slots").read_text().strip() == slots
