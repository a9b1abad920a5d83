"""smg, the gateway that has an OpenAI-compatible API in front of runners: how to start it, and whether it is ready."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from services.addresses import TcpAddress, parse_address
from services.config import UpSettings
from services.errors import StartupError

ANSWER_SECONDS = 2.0
"""For an answer of the gateway."""
WEDGE_SECONDS = 30
"""Of an engine's silence, after which a gateway takes it for broken."""
READY_SECONDS = 120.0
"""For a gateway to become ready in front of a runner that is."""
CHECK_SECONDS = 1
"""Between two looks of the gateway at a runner: while it starts, and later."""


def check_gateway(settings: UpSettings) -> None:
    """Finds what would keep a gateway from serving these settings. Raises StartupError."""
    if any(importlib.util.find_spec(name) is None for name in ("smg", "smg_grpc_proto")):
        raise StartupError("--gateway needs smg: pip install 'octavo[gateway]'.")
    if settings.vllm_address is not None:
        return
    if settings.vllm_grpc is False:
        raise StartupError("--gateway speaks to the runner by what --no-vllm-grpc leaves out: give --vllm-address.")
    if not isinstance(parse_address(settings.runner_address), TcpAddress):
        raise StartupError(
            f"--gateway reaches a runner by TCP alone, and this one is at {settings.runner_address}: give "
            "--runner-address host:port, or --vllm-address."
        )
    if settings.server_tls() is not None:
        raise StartupError("--gateway with --tls-cert needs --vllm-address: smg speaks no TLS to runners.")
    if settings.auth_tokens is not None:
        raise StartupError("--gateway with --auth-tokens needs --vllm-address: smg sends runners no token.")


def gateway_command(address: str, metrics_address: str, runners: Sequence[str], grace_seconds: float) -> list[str]:
    """The command line of a gateway at `address` before runners at TCP addresses."""
    own, metrics = _tcp(address), _tcp(metrics_address)
    return [
        *(sys.executable, "-m", "smg", "launch"),
        *("--host", own.host, "--port", str(own.port)),
        *("--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port)),
        *("--worker-urls", *(f"grpc://{reachable(_tcp(runner))}" for runner in runners)),
        *("--worker-startup-check-interval", str(CHECK_SECONDS), "--health-check-interval-secs", str(CHECK_SECONDS)),
        # A prefix that is cached is always gone to: none of the hits warms other runners up.
        *("--worker-warmup-divert-every", "0"),
        # A step of a model on a CPU takes its time.
        *("--worker-wedge-secs", str(WEDGE_SECONDS)),
        *("--shutdown-grace-period-secs", str(max(1, math.ceil(grace_seconds)))),
        *("--log-level", "error"),
    ]


def reachable(address: TcpAddress) -> TcpAddress:
    """Where a server that listens at `address` is reached from this machine."""
    return TcpAddress({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host), address.port)


def openai_url(address: str) -> str:
    """The base URL that an OpenAI client takes."""
    return f"http://{reachable(_tcp(address))}/v1"


def why_not_ready(address: str) -> str:
    """What a gateway still waits for; empty when it has a runner and its tokenizer."""
    try:
        with urllib.request.urlopen(f"http://{reachable(_tcp(address))}/readiness", timeout=ANSWER_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read() or b"{}").get("reason", f"it answers {error.code}"))
    except OSError:
        return "it does not answer"


def _tcp(address: str) -> TcpAddress:
    parsed = parse_address(address)
    if not isinstance(parsed, TcpAddress):
        raise ValueError(f"{address} is no TCP address")
    return parsed
