"""The other end of bench.streaming: a process of its own that streams, or sends a long text, when it is told to.

It reads one JSON object a line and answers each with one. Times are seconds of the system's monotonic clock, which all
processes share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from services.channels import open_aio_channel

SERVICE = f"/{pb.DESCRIPTOR.services_by_name['ModelRunnerService'].full_name}"


async def stream(channel: grpc.aio.Channel, order: dict[str, Any]) -> dict[str, Any]:
    """Runs `streams` requests at once; when each chunk came, by stream, and the CPU seconds of this process."""
    # Bytes as they come: reading the message is not what is measured.
    generate = channel.unary_stream(f"{SERVICE}/Generate", request_serializer=pb.GenerateRequest.SerializeToString)

    async def one(number: int) -> list[float]:
        request = pb.GenerateRequest(stop=pb.StopConditions(max_tokens=order["tokens"], ignore_eos=True))
        request.token_ids.ids.extend([number + 1] * order["prompt_tokens"])
        return [time.monotonic() async for _ in generate(request)]

    began = time.process_time()
    arrivals = await asyncio.gather(*map(one, range(order["streams"])))
    return {"arrivals": arrivals, "cpu_seconds": time.process_time() - began}


async def send_text(channel: grpc.aio.Channel, order: dict[str, Any]) -> dict[str, Any]:
    """Sends one text by `verb`; when it was sent and when it was answered. A refusal is an answer too."""
    stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
    sent, answer = time.monotonic(), "OK"
    try:
        if order["verb"] == "Tokenize":
            await stub.Tokenize(pb.TokenizeRequest(text=order["text"]))
        else:
            stop = pb.StopConditions(max_tokens=1)
            async for _ in stub.Generate(pb.GenerateRequest(text=order["text"], stop=stop)):
                pass
    except grpc.RpcError as error:
        answer = error.code().name
    return {"sent": sent, "answered": time.monotonic(), "answer": answer}


async def main(address: str) -> None:
    async with open_aio_channel(address) as channel:
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            work = stream if order["do"] == "stream" else send_text
            print(json.dumps(await work(channel, order)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
