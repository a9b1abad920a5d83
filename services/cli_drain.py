"""The command `drain`: takes a model runner out of service and waits for what it is doing, before a pod is stopped."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer
from octavo.runner.v1 import runner_admin_pb2 as pb
from octavo.runner.v1 import runner_admin_pb2_grpc

from services.channels import open_channel
from services.cli_common import rpc_failed
from services.config import ClientSettings
from services.errors import StartupError
from services.options import with_settings

ANSWER_SECONDS = 10.0
"""For the call itself, beyond what the drain may take."""

ADMIN_FIELDS = ("runner_admin_address",)


def add_drain_command(app: typer.Typer) -> None:
    """Mounts the command."""
    app.command("drain", short_help="Take a model runner out of service, and let its requests finish.")(drain)


@with_settings(ClientSettings, only=ADMIN_FIELDS, names={"runner_admin_address": ("--admin-address",)})
def drain(
    settings: ClientSettings,
    lame_duck_seconds: Annotated[
        float,
        typer.Option(
            "--lame-duck-seconds",
            min=0,
            max=3_600,
            metavar="SECONDS",
            help="Seconds in which requests are still taken, until everybody has learnt that it is NOT_SERVING.",
        ),
    ] = 5.0,
    drain_seconds: Annotated[
        float,
        typer.Option(
            "--drain-seconds",
            min=0,
            max=86_400,
            metavar="SECONDS",
            help="Seconds after these that what is in progress may take.",
        ),
    ] = 60.0,
) -> None:
    """Takes a model runner out of service: it says NOT_SERVING at once, and a little later refuses new requests.

    Returns when no request is in progress, or when the time is over; the exit code is 0 in both cases. The runner goes
    on with what is left until it is stopped.
    """
    address = settings.runner_admin_address
    if address is None:
        raise StartupError("Where is the runner? Give its --admin-address, as its --runner-admin-address has it.")
    request = pb.DrainRequest(lame_duck_seconds=lame_duck_seconds, drain_seconds=drain_seconds)
    with open_channel(address) as channel:
        stub = runner_admin_pb2_grpc.RunnerAdminServiceStub(channel)
        try:
            answer = stub.Drain(request, timeout=lame_duck_seconds + drain_seconds + ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise rpc_failed(error, "model runner", address) from None
    typer.echo(_summary(answer))


def _summary(answer: pb.DrainResponse) -> str:
    seconds = answer.elapsed.seconds + answer.elapsed.nanos / 1e9
    ended = f"{_requests(answer.finished_requests)} finished in {seconds:.1f} s"
    if not answer.remaining_requests:
        return f"Drained: {ended}, none are left."
    left = "is" if answer.remaining_requests == 1 else "are"
    return f"Not drained: {ended}, and {_requests(answer.remaining_requests)} {left} left; the time is over."


def _requests(number: int) -> str:
    return f"{number} request{'' if number == 1 else 's'}"
