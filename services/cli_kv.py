"""The commands of the KV manager: kv-manager, pool, sequence and check; those of the cache are mounted with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer
from octavo.kv.v1 import kv_manager_pb2 as pb
from rich.console import Console, Group
from rich.live import Live

from services.cli_common import EXIT_WRONG, print_json
from services.cli_kv_cache import add_cache_commands
from services.cli_kv_common import CALL_SECONDS, CLIENT_FIELDS, Json, kv_manager_at, plain
from services.cli_kv_tables import block_table, pool_facts, pool_table
from services.config import ClientSettings, KvManagerSettings
from services.logging import configure_logging
from services.options import with_settings

CHECK_SECONDS = 120.0
HASH_TABLE_WIDTH = 110


def add_kv_commands(app: typer.Typer) -> None:
    """Mounts the commands."""
    app.command("kv-manager", short_help="Serve the books of the KV cache.")(kv_manager)
    app.command("pool", short_help="Show how full a pool is.")(pool)
    app.command("sequence", short_help="Show a sequence's block table.")(sequence)
    app.command("check", short_help="Have the books checked.")(check)
    add_cache_commands(app)


@with_settings(KvManagerSettings)
def kv_manager(settings: KvManagerSettings) -> None:
    """Serves the books of the paged KV cache, until SIGTERM or Ctrl-C."""
    # Imported here, so that the tools start without what only the server needs.
    from services.kv_process import serve_kv_manager

    configure_logging(settings.log_level, settings.log_format, service="kv-manager")
    asyncio.run(serve_kv_manager(settings))


@with_settings(ClientSettings, only=CLIENT_FIELDS, names={"kv_address": ("--address",)})
def pool(
    settings: ClientSettings,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    interval: Annotated[
        float,
        typer.Option(
            "--interval", min=0.1, max=86_400, metavar="SECONDS", help="Seconds between two looks of --watch."
        ),
    ] = 1.0,
) -> None:
    """Shows how full a pool is: blocks by state, tokens, sequences, and what has happened since it was opened."""
    with kv_manager_at(settings) as stub:

        def read() -> pb.GetPoolResponse:
            return stub.GetPool(pb.GetPoolRequest(pool_id=settings.pool_id), timeout=CALL_SECONDS)

        if json:
            _repeat(lambda: print_json(plain(read())), interval if watch else None)
        elif watch:
            _watch_pool(read, interval)
        else:
            Console().print(_pool_view(read()))


@with_settings(ClientSettings, only=CLIENT_FIELDS, names={"kv_address": ("--address",)})
def sequence(
    settings: ClientSettings,
    sequence_id: Annotated[str, typer.Argument(metavar="ID", help="Name of a live sequence.")],
    json: Json = False,
) -> None:
    """Shows the block table of a sequence: each block, its reference count, its tokens and its hash."""
    with kv_manager_at(settings) as stub:
        request = pb.GetBlockTableRequest(pool_id=settings.pool_id, sequence_id=sequence_id)
        table = stub.GetBlockTable(request, timeout=CALL_SECONDS)
    if json:
        print_json(plain(table) | {"blocks": [_plain_block(each) for each in table.blocks]})
    else:
        _wide_console().print(block_table(table))


@with_settings(ClientSettings, only=CLIENT_FIELDS, names={"kv_address": ("--address",)})
def check(settings: ClientSettings, json: Json = False) -> None:
    """Has the KV manager recompute its books and compare. Exit code 0: right, 1: wrong, 2: could not be checked."""
    with kv_manager_at(settings) as stub:
        report = stub.Check(pb.CheckRequest(pool_id=settings.pool_id), timeout=CHECK_SECONDS)
    if json:
        print_json(plain(report))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(EXIT_WRONG)


def _repeat(show: Callable[[], None], seconds: float | None) -> None:
    """Shows once, or every so many seconds until Ctrl-C."""
    show()
    while seconds is not None:
        time.sleep(seconds)
        show()


def _watch_pool(read: Callable[[], pb.GetPoolResponse], seconds: float) -> None:
    console = Console()
    if not console.is_terminal:
        _repeat(lambda: console.print(_pool_view(read())), seconds)
        return
    with Live(_pool_view(read()), console=console, auto_refresh=False) as live:
        _repeat(lambda: live.update(_pool_view(read()), refresh=True), seconds)


def _pool_view(answer: pb.GetPoolResponse) -> Group:
    return Group(pool_facts(answer), pool_table(answer))


def _wide_console() -> Console:
    """A console with room for a whole hash: a narrow terminal wraps the line, and nothing is cut."""
    console = Console()
    console.width = max(console.width, HASH_TABLE_WIDTH)
    return console


def _print_report(report: pb.CheckResponse) -> None:
    looked_at = f"{report.checked_blocks} blocks and {report.checked_sequences} sequences checked"
    if report.ok:
        typer.echo(f"The books are right: {looked_at}.")
        return
    typer.echo(f"The books are wrong in {len(report.violations)} ways; {looked_at}:")
    for violation in report.violations:
        typer.echo(f"- {violation}")


def _plain_block(block: pb.BlockInfo) -> dict[str, Any]:
    return {
        "block_id": block.block_id,
        "reference_count": block.reference_count,
        "block_hash": block.block_hash.hex(),
        "stored_tokens": block.stored_tokens,
    }
