"""The commands for who looks after the prefix cache: remove-prefix, quota and events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.cli_common import EXIT_WRONG, SALT_VARIABLES, parse_ids, print_json
from services.cli_kv_common import CALL_SECONDS, CLIENT_FIELDS, Json, kv_manager_at, plain
from services.config import ClientSettings
from services.errors import StartupError
from services.options import with_settings

TOKENIZE_SECONDS = 30.0
HASH_DIGITS = 16
"""Enough to tell blocks apart; --json has them all."""

_MAX_COUNT = (1 << 63) - 1

Stub = kv_manager_pb2_grpc.KvManagerServiceStub


def add_cache_commands(app: typer.Typer) -> None:
    """Mounts the commands."""
    app.command("remove-prefix", short_help="Forget what is cached of a prompt.")(remove_prefix)
    app.command("quota", short_help="Show or set what a tenant may occupy.")(quota)
    app.command("events", short_help="Print what happens to the prefix index.")(events)


@with_settings(
    ClientSettings, only=(*CLIENT_FIELDS, "runner_address", "auth_token_file"), names={"kv_address": ("--address",)}
)
def remove_prefix(
    settings: ClientSettings,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", help="The prompt as token ids, separated by commas.", metavar="1,2,3")
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="The prompt as text, which the model runner turns into token ids.")
    ] = None,
    cache_salt: Annotated[
        str,
        typer.Option(
            "--cache-salt",
            envvar=SALT_VARIABLES,
            help="Salt that the prompt was sent with. Other users of the machine see a command line: prefer "
            "OCTAVO_SALT.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """Forgets what is cached of a prompt, up to its last full block, and of all that continue it, pinned or not.

    Blocks that begin other cached prompts stay. Exit code 0: done, 1: blocks stay that live sequences hold (ask again
    when they have ended), 2: it could not be done.
    """
    ids = _prompt_ids(settings, token_ids, text)
    try:
        request = pb.RemovePrefixRequest(pool_id=settings.pool_id, token_ids=ids, scope=pb.CacheScope(salt=cache_salt))
    except (ValueError, OverflowError) as error:
        raise StartupError(f"The request cannot be sent: {error}.") from None
    with kv_manager_at(settings) as stub:
        answer = stub.RemovePrefix(request, timeout=CALL_SECONDS)
    if json:
        print_json(plain(answer))
    else:
        held = f"; live sequences hold {_blocks(answer.held_blocks)}" if answer.held_blocks else ""
        typer.echo(f"{_blocks(answer.removed_blocks)} forgotten{held}.")
    if answer.held_blocks:
        raise typer.Exit(EXIT_WRONG)


@with_settings(ClientSettings, only=CLIENT_FIELDS, names={"kv_address": ("--address",)})
def quota(
    settings: ClientSettings,
    salt: Annotated[
        str,
        typer.Argument(
            metavar="[SALT]",
            envvar=SALT_VARIABLES,
            help="The tenant's cache salt; none: everybody who gives no salt. Other users of the machine see a command "
            "line: prefer OCTAVO_SALT.",
        ),
    ] = "",
    every_salt: Annotated[
        bool, typer.Option("--every-salt", help="Set the quota of each salt that has none of its own.")
    ] = False,
    max_blocks: Annotated[
        int | None,
        typer.Option(
            "--max-blocks",
            min=0,
            max=_MAX_COUNT,
            metavar="BLOCKS",
            help="Blocks, held and cached, that the tenant may occupy; 0: no limit. Without it, nothing is changed.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Shows what a tenant occupies and may occupy, in blocks; with --max-blocks sets that first.

    A quota lasts until the pool is opened anew. Exit code 0: done, 2: it could not be done.
    """
    if every_salt and salt:
        raise StartupError("Give either a salt (also by OCTAVO_SALT) or --every-salt.")
    if every_salt and max_blocks is None:
        raise StartupError("--every-salt needs --max-blocks.")
    with kv_manager_at(settings) as stub:
        if max_blocks is not None:
            whose: dict[str, Any] = {"every_salt": True} if every_salt else {"salt": salt}
            stub.SetQuota(
                pb.SetQuotaRequest(pool_id=settings.pool_id, max_blocks=max_blocks, **whose), timeout=CALL_SECONDS
            )
        if every_salt:
            _show_default_quota(max_blocks or 0, json)
        else:
            tenant = stub.GetTenant(pb.GetTenantRequest(pool_id=settings.pool_id, salt=salt), timeout=CALL_SECONDS)
            _show_tenant(tenant, json)


@with_settings(ClientSettings, only=CLIENT_FIELDS, names={"kv_address": ("--address",)})
def events(
    settings: ClientSettings,
    from_number: Annotated[
        int,
        typer.Option(
            "--from",
            min=0,
            max=_MAX_COUNT,
            metavar="NUMBER",
            help="Number of the first event wanted; 0 begins with a snapshot of all that can be found.",
        ),
    ] = 0,
    boot_id: Annotated[
        str,
        typer.Option(
            "--boot-id",
            help="The boot_id that --json showed with the events before --from; if the KV manager has restarted since, "
            "begin with a snapshot.",
        ),
    ] = "",
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", help="Go on until Ctrl-C, or end with what has happened so far."),
    ] = True,
    json: Json = False,
) -> None:
    """Prints what happens to a pool's prefix index: which blocks can be found from now on, and which no longer.

    One line for each event; a snapshot has one for each chain of blocks. --json has number, kind (snapshot, stored,
    removed or cleared), block_hashes, each the parent of the next, and the parent_hash of the first, both in hex.
    """
    with kv_manager_at(settings) as stub:
        request = pb.WatchEventsRequest(pool_id=settings.pool_id, from_number=from_number, boot_id=boot_id)
        last = None if follow else _newest(stub, settings.pool_id)
        if last is not None and _is_behind(request, last):
            return
        for answer in _answers(stub, request, last):
            for line in _event_lines(answer):
                print_json(line) if json else typer.echo(_event_text(line))


def _prompt_ids(settings: ClientSettings, token_ids: str | None, text: str | None) -> list[int]:
    if (token_ids is None) == (text is None):
        raise StartupError("Give either --token-ids or --text.")
    if token_ids is not None:
        return parse_ids(token_ids)
    # Only a text needs a model runner; all else here does without the engine's modules.
    from services.client import Client, OctavoError

    token = settings.token()
    with Client(settings.runner_address, tls=settings.tls(), token=token, timeout=TOKENIZE_SECONDS) as client:
        try:
            return client.tokenize(text)
        except OctavoError as error:
            raise StartupError(str(error)) from None


def _show_tenant(tenant: pb.GetTenantResponse, json: bool) -> None:
    if json:
        print_json(plain(tenant))
        return
    used = tenant.held_blocks + tenant.cached_blocks
    limit = f"of {_blocks(tenant.quota_blocks)}" if tenant.quota_blocks else "blocks without a limit"
    typer.echo(f"{used} {limit} occupied: {tenant.held_blocks} held, {tenant.cached_blocks} cached.")


def _show_default_quota(max_blocks: int, json: bool) -> None:
    if json:
        print_json({"quota_blocks": max_blocks})
        return
    limit = f"at most {_blocks(max_blocks)}" if max_blocks else "as many blocks as there are"
    typer.echo(f"Each salt without a quota of its own may occupy {limit}.")


def _newest(stub: Stub, pool_id: str) -> pb.WatchEventsResponse:
    """The beginning of a snapshot of this moment, which tells the number of the newest event."""
    stream = stub.WatchEvents(pb.WatchEventsRequest(pool_id=pool_id), timeout=CALL_SECONDS)
    try:
        return next(iter(stream))
    finally:
        stream.cancel()


def _is_behind(request: pb.WatchEventsRequest, last: pb.WatchEventsResponse) -> bool:
    """Whether the first event wanted is the one that comes next: then nothing has happened that is to be shown."""
    return request.from_number == last.number + 1 and request.boot_id in ("", last.boot_id)


def _answers(
    stub: Stub, request: pb.WatchEventsRequest, last: pb.WatchEventsResponse | None
) -> Iterator[pb.WatchEventsResponse]:
    """The stream, for ever or up to the event `last`."""
    stream = stub.WatchEvents(request)
    try:
        for answer in stream:
            yield answer
            is_part = answer.WhichOneof("event") == "snapshot" and not answer.snapshot.last
            if last is not None and answer.number >= last.number and not is_part:
                return
    finally:
        stream.cancel()


def _event_lines(answer: pb.WatchEventsResponse) -> Iterator[dict[str, Any]]:
    """What is printed of one answer: a line, or of a snapshot one for each chain, marked first and last."""
    kind = str(answer.WhichOneof("event"))
    line: dict[str, Any] = {"boot_id": answer.boot_id, "number": answer.number, "kind": kind}
    if kind == "snapshot":
        # An empty index is a snapshot too.
        chains = list(answer.snapshot.stored) or [pb.BlocksStored()]
        for index, chain in enumerate(chains):
            is_first = answer.snapshot.first and index == 0
            is_last = answer.snapshot.last and index == len(chains) - 1
            yield line | _chain(chain) | {"first": is_first, "last": is_last}
    elif kind == "stored":
        yield line | _chain(answer.stored)
    else:
        yield line | _chain(pb.BlocksStored(block_hashes=answer.removed.block_hashes))


def _chain(stored: pb.BlocksStored) -> dict[str, Any]:
    chain: dict[str, Any] = {
        "block_hashes": [each.hex() for each in stored.block_hashes],
        "parent_hash": stored.parent_hash.hex(),
    }
    if stored.adapter_id:
        chain |= {"adapter_id": stored.adapter_id, "adapter_version": stored.adapter_version}
    return chain


def _event_text(line: dict[str, Any]) -> str:
    hashes = [each[:HASH_DIGITS] for each in line["block_hashes"]]
    parent = f" behind {line['parent_hash'][:HASH_DIGITS]}" if line["parent_hash"] else ""
    adapter = f" for adapter {line['adapter_id']}" if "adapter_id" in line else ""
    blocks = "" if line["kind"] == "cleared" else f" {_blocks(len(hashes))}{parent}{adapter}"
    return f"{line['number']}  {line['kind']}{blocks}{': ' if hashes else ''}{' '.join(hashes)}"


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"
