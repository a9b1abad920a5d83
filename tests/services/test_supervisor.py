"""Children start whatever gRPC does in their parent at that moment."""

from __future__ import annotations

import subprocess
import sys

from tests.services.kv_support import WAIT_SECONDS, clean_environment

PARENT = """
import services.cli  # before gRPC, as in every command
import asyncio, os, subprocess, sys
import grpc
from services.channels import open_aio_channel
from services.supervisor import die_with_parent

async def talk(channel):
    while True:
        try:
            await channel.unary_unary("/nobody/Listens")(b"", timeout=1)
        except grpc.aio.AioRpcError:
            pass

async def main(path):
    server = grpc.aio.server()
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    channel = open_aio_channel(f"unix:{path}")
    talks = [asyncio.create_task(talk(channel)) for _ in range(4)]
    codes = set()
    for _ in range(40):
        await asyncio.sleep(0.002)
        child = subprocess.Popen(["true"], preexec_fn=die_with_parent(), start_new_session=True)
        codes.add(await asyncio.to_thread(child.wait))
    print(codes, flush=True)
    os._exit(0)

asyncio.run(main(sys.argv[1]))
"""


def test_children_start_while_grpc_is_busy(tmp_path):
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path / "busy.sock")],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert parent.stdout == "{0}\n", parent.stderr
