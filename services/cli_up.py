"""The commands that serve: `model-runner`, and `up`, which starts both services."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from services.cli_common import EXIT_WRONG
from services.cli_generate import Answer
from services.client import Client, OctavoError
from services.config import KvManagerSettings, ModelRunnerSettings, OctavoSettings, UpSettings
from services.errors import StartupError
from services.logging import configure_logging
from services.options import with_settings
from services.supervisor import Interrupted, Supervisor, raise_on_signals

DEMO_CHAT = [{"role": "user", "content": "What is a KV cache, and why does an LLM server keep one?"}]
DEMO_MAX_TOKENS = 96


def add_service_commands(app: typer.Typer) -> None:
    """Mounts the commands."""
    app.command("up")(up)
    app.command("model-runner")(model_runner)


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
    once: Annotated[bool, typer.Option("--once", help="With --demo: stop after the answer.")] = False,
) -> None:
    """Starts the KV manager and the model runner as two processes, and stops both on Ctrl-C."""
    raise_on_signals()
    supervisor = Supervisor(settings.grace_seconds, settings.kv_tls())
    try:
        _start(supervisor, settings)
        if demo:
            _demonstrate(settings)
        if once:
            return
        _say_what_next(settings)
        supervisor.wait()
    except Interrupted:
        typer.echo("\nStopping both services.", err=True)
    finally:
        supervisor.stop()


def _start(supervisor: Supervisor, settings: UpSettings) -> None:
    manager = supervisor.start("kv-manager", _arguments(settings, KvManagerSettings), settings.kv_address)
    supervisor.wait_ready(manager)
    runner = supervisor.start("model-runner", _arguments(settings, ModelRunnerSettings), settings.runner_address)
    supervisor.wait_ready(runner)


def _arguments(settings: UpSettings, service: type[OctavoSettings]) -> list[str]:
    """What was set for `up` and the service knows, as its command line; defaults are the service's own."""
    names = [name for name in service.model_fields if name in settings.model_fields_set and name != "config"]
    values: list[tuple[str, Any]] = [(name, getattr(settings, name)) for name in names]
    return [f"--{name.replace('_', '-')}={value}" for name, value in values if value is not None]


def _demonstrate(settings: UpSettings) -> None:
    answer = Answer(1)
    typer.echo(f"\n> {DEMO_CHAT[0]['content']}\n")
    try:
        with Client(settings.runner_address, tls=settings.kv_tls()) as client:
            for chunk in client.generate(chat=DEMO_CHAT, max_tokens=DEMO_MAX_TOKENS):
                answer.add(chunk)
                typer.echo(chunk.text, nl=False)
                sys.stdout.flush()
    except OctavoError as error:
        raise StartupError(f"The demo failed: {error}") from None
    typer.echo(f"\n\n{answer.summary()}\n")
    if answer.usage is None:
        raise typer.Exit(EXIT_WRONG)


def _say_what_next(settings: UpSettings) -> None:
    runner, manager = settings.runner_address, settings.kv_address
    address = "" if runner == ModelRunnerSettings.model_fields["runner_address"].default else f" --address {runner}"
    typer.echo(
        f"""Serving at {runner}; the KV manager is at {manager}. Ctrl-C stops both. In another terminal:

  octavo generate --chat "Who wrote Pride and Prejudice?"{address}
  octavo pool --watch

or from Python:

  from octavo import Client
  for chunk in Client("{runner}").generate("Once upon a time", max_tokens=32):
      print(chunk.text, end="", flush=True)
"""
    )
