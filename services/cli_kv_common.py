"""What the commands of the KV manager share: the connection, options, and messages as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_channel
from services.cli_common import rpc_failed
from services.config import ClientSettings

CALL_SECONDS = 5.0
CLIENT_FIELDS = ("kv_address", "pool_id", "tls_ca", "tls_cert", "tls_key")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")]


@contextmanager
def kv_manager_at(settings: ClientSettings) -> Iterator[kv_manager_pb2_grpc.KvManagerServiceStub]:
    """A stub for the KV manager; a failed call becomes a StartupError with one sentence."""
    with open_channel(settings.kv_address, settings.tls()) as channel:
        try:
            yield kv_manager_pb2_grpc.KvManagerServiceStub(channel)
        except grpc.RpcError as error:
            raise rpc_failed(error, "KV manager", settings.kv_address) from None


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON: its own field names, zeros included, 64-bit numbers as numbers, short names of choices."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _with_numbers(message, found)


def choice_name(choices: EnumDescriptor, number: int) -> str:
    """The short name of an enum's value: 'radix' for PREFIX_INDEX_RADIX."""
    names = [each.name for each in choices.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    return choices.values_by_number[number].name.removeprefix(prefix).lower()


def _with_numbers(message: Message, found: dict[str, Any]) -> dict[str, Any]:
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if isinstance(value, dict):
            _with_numbers(getattr(message, field.name), value)
        elif field.type == field.TYPE_ENUM:
            found[field.name] = choice_name(field.enum_type, getattr(message, field.name))
        elif isinstance(value, str) and field.type != field.TYPE_STRING and field.type != field.TYPE_BYTES:
            found[field.name] = int(value)
    return found
