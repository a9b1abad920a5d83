"""What all commands share: one line on stderr and exit code 2 instead of a traceback, and output helpers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import grpc
import typer

from services.connection_faults import tls_fault
from services.errors import StartupError, describe_rpc_error

EXIT_WRONG = 1
"""The command ran, and what it looked at is wrong."""
EXIT_UNABLE = 2
"""The command could not do its work."""

SALT_VARIABLES = ["OCTAVO_SALT", "OCTAVO_CACHE_SALT"]
"""Where a cache salt may come from without being seen on the command line."""

_UNREACHABLE = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


def run_or_exit_2(work: Callable[[], None]) -> None:
    """Runs `work`; a StartupError becomes its sentence on stderr and exit code 2. Ctrl-C ends quietly with 130."""
    try:
        work()
    except StartupError as error:
        typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(EXIT_UNABLE) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output went away (`octavo pool | head -1`): typer ends the command for it.
        raise
    except OSError as error:
        typer.echo(f"octavo: cannot write the output: {error.strerror}.", err=True)
        raise typer.Exit(EXIT_UNABLE) from None


def rpc_failed(error: grpc.RpcError, what: str, address: str) -> StartupError:
    """The sentence for a failed call to `what` ('KV manager') at `address`."""
    view = describe_rpc_error(error)
    if view.code not in _UNREACHABLE or view.reason:
        return StartupError(f"{what} at {address}: {view.sentence} ({view.code})")
    if view.code == "DEADLINE_EXCEEDED":
        return StartupError(f"The {what} at {address} did not answer in time.")
    if fault := tls_fault(view.sentence):
        return StartupError(f"The {what} at {address} cannot be reached: {fault}.")
    # gRPC's sentence ends with the cause: "...: Connection refused".
    cause = view.sentence.rsplit(": ", 1)[-1].rstrip(".")
    return StartupError(f"No {what} answers at {address} ({cause}); is it running?")


def parse_ids(text: str, option: str = "--token-ids") -> list[int]:
    """Reads token ids as '1,2,3'. Raises StartupError."""
    try:
        return [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise StartupError(f"{option} {text!r} must be whole numbers separated by commas.") from None


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False))
