"""Whether and where a model runner has vllm.grpc.engine.VllmEngine: as told, or else if smg-grpc-proto is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from google.protobuf.runtime_version import VersionError

from services.answering import Answering
from services.config import ModelRunnerSettings
from services.errors import StartupError

if TYPE_CHECKING:
    from services.vllm_side import VllmSide

log = structlog.get_logger()


def choose_vllm(settings: ModelRunnerSettings, answering: Answering) -> VllmSide | None:
    """The second contract, or None without it. Raises StartupError when it is wanted and can't be had."""
    if settings.vllm_tenant is not None and settings.vllm_address is None:
        raise StartupError("--vllm-tenant is whose the calls at --vllm-address are: give that too.")
    has_door = settings.vllm_address is not None
    if settings.vllm_grpc is False and not has_door:
        return None
    is_wanted = settings.vllm_grpc or has_door
    try:
        from services.vllm_side import VllmSide
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("smg_grpc_proto"):
            raise
        if is_wanted:
            raise StartupError("VllmEngine needs smg-grpc-proto: pip install 'octavo[gateway]'.") from None
        return None
    except (VersionError, RuntimeError) as error:
        # What generated code says of a grpcio or protobuf that is older than it wants.
        if is_wanted:
            raise StartupError(f"VllmEngine: the installed smg-grpc-proto cannot be used: {error}") from None
        log.warning("VllmEngine is not served: the installed smg-grpc-proto cannot be used", reason=str(error))
        return None
    return VllmSide(answering)


def is_at_runner_address(settings: ModelRunnerSettings) -> bool:
    """Whether --runner-address has VllmEngine, where it is served at all. --vllm-address always has it."""
    return settings.vllm_grpc is not False
