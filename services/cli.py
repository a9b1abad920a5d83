"""The `octavo` command: both services, and the tools that call them."""

from __future__ import annotations

import os
from typing import Annotated

# Read by grpc-core when it is imported. Its own complaints would stand beside our one sentence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Children are started by fork and exec. grpc-core's handlers of a fork, which nobody needs then, crash in one child of
# four while gRPC is busy in the parent.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import typer

from services.cli_drain import add_drain_command
from services.cli_generate import add_generate_command
from services.cli_kv import add_kv_commands
from services.cli_soak import add_soak_command
from services.cli_up import add_service_commands
from services.metrics import octavo_version

app = typer.Typer(
    name="octavo",
    help="LLM serving from a paged KV cache whose books are kept by a process of their own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {octavo_version()}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """LLM serving from a paged KV cache whose books are kept by a process of their own."""


add_service_commands(app)
add_kv_commands(app)
add_generate_command(app)
add_drain_command(app)
add_soak_command(app)


def main() -> None:
    """Entry point of the installed command."""
    app()


if __name__ == "__main__":
    main()
