"""From settings to a model that is ready to run: device, threads, weights, K/V memory, attention backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
import torch
from octavo.runner.v1 import model_runner_pb2 as pb
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from model_runner import native
from model_runner.attention import AttentionBackend
from model_runner.books import PoolFacts
from model_runner.device_copies import CudaLane
from model_runner.engine_types import EngineOptions
from model_runner.errors import ModelLoadError
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import KvMemory, describe_bytes
from model_runner.largest_step import StepBounds
from model_runner.loading import KV_DTYPES, LoadedModel, demo_model_path, load_model
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder
from model_runner.sampling_choice import SamplerChoice, choose_sampler
from model_runner.sampling_device import Sampler
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.steps import InlineSteps, Steps, WorkerSteps
from model_runner.stream_steps import StreamSteps
from model_runner.tokenizer import Tokenizer
from model_runner.validation import Limits
from model_runner.waiting_line import SchedulingPolicy
from services.config import ModelRunnerSettings
from services.cpus import usable_cpus
from services.errors import StartupError
from services.form_compiler import FormCompiler
from services.graph_setup import prepared_executor
from services.kv_scaling import UNSCALED, Scaling, is_scaled, scaling_for, wants_checkpoint_scales
from services.model_cache import allocate_cache, free_of, smallest_shape

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Setup:
    """A loaded model with its physical cache, and the limits that follow from both."""

    loaded: LoadedModel
    backend: AttentionBackend
    executor: TorchExecutor
    memory: KvMemory
    options: EngineOptions
    limits: Limits
    scaling: Scaling = UNSCALED
    sampler: Sampler | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def steps(self) -> Steps:
        """Where steps run: on the engine's thread, or beside it."""
        device = self.backend.shape.device
        if not self.options.async_steps:
            return InlineSteps(self.executor)
        if device.type == "cuda":
            return StreamSteps(self.executor, CudaLane(device), self.sampler)
        return WorkerSteps(self.executor)

    def form_compiler(self) -> FormCompiler:
        """What makes constraints of structured_output."""
        return FormCompiler(self.tokenizer, self.limits.vocab_size, sorted(self.options.eos_token_ids))

    def describe(self, pool_id: str) -> pb.GetModelResponse:
        """What GetModel answers."""
        facts = self.options.facts
        return pb.GetModelResponse(
            model=self.loaded.name,
            architecture=self.loaded.config.architecture,
            vocab_size=self.limits.vocab_size,
            max_sequence_tokens=self.limits.max_sequence_tokens,
            eos_token_ids=sorted(self.options.eos_token_ids),
            has_chat_template=self.tokenizer.chat_template is not None,
            weights_dtype=self.loaded.weights_form,
            kv_dtype=_dtype_name(self.backend.shape.kv_dtype),
            kv_scales=self.scaling.source,
            attention_backend=self.backend.name,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            kv_bytes_per_token=self.memory.bytes_per_token,
            pool_id=pool_id,
            deterministic=why_not_deterministic(self.loaded.model, self.backend) is None,
            activations_dtype=self.loaded.activations_dtype,
            speculative_tokens=self.options.limits.speculative_tokens,
            speculative_ngram=self.options.limits.speculative_ngram,
        )


def set_up_model(settings: ModelRunnerSettings, is_stopped: Callable[[], bool] = lambda: False) -> Setup:
    """Loads the model and allocates its cache; blocks for seconds, unless it is stopped before the next tensor.

    Raises StartupError with one sentence.
    """
    device, with_kv_scales = _device(settings.device), wants_checkpoint_scales(settings)
    _set_threads(settings.num_threads or usable_cpus())
    try:
        with _progress(settings, is_stopped) as on_progress:
            loaded = load_model(
                settings.model or demo_model_path(),
                weights_dtype=settings.weights_dtype,
                activations_dtype=settings.activations_dtype,
                device=device,
                name=settings.model_name,
                with_kv_scales=with_kv_scales,
                on_progress=on_progress,
            )
    except ModelLoadError as error:
        raise StartupError(str(error)) from None
    except torch.OutOfMemoryError:
        name = settings.model or "the demo model"
        raise StartupError(f"The weights of {name} do not fit {device}{free_of(device)}.") from None
    return _with_cache(settings, loaded, device)


def _with_cache(settings: ModelRunnerSettings, loaded: LoadedModel, device: torch.device) -> Setup:
    config = loaded.config
    kv_dtype = KV_DTYPES.get(settings.kv_dtype, loaded.weights_dtype)
    drawing = _choose_sampler(settings, device, config.vocab_size)
    memory = KvMemory(config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype.itemsize, settings.block_size)
    shape = smallest_shape(loaded, memory, kv_dtype, device)
    scaling = scaling_for(settings, loaded, shape)
    bounds = StepBounds(
        tokens=settings.max_batched_tokens,
        sequences=settings.max_sequences,
        block_size=settings.block_size,
        longest=config.max_position_embeddings,
        guesses=settings.speculative_tokens,
        runs_ahead=_are_async(settings, device),
        sampler=drawing.sampler,
    )
    choice = allocate_cache(settings, loaded, memory, replace(shape, scales=scaling.scales), bounds)
    backend = choice.backend
    num_blocks = backend.shape.num_blocks
    cache = _dtype_name(kv_dtype)
    variance = why_not_deterministic(loaded.model, backend)
    if settings.deterministic and variance is not None:
        raise StartupError(f"--deterministic cannot be promised: {variance}.")
    longest = min(config.max_position_embeddings, (num_blocks - 1) * settings.block_size)
    prepared = prepared_executor(settings, loaded.model, backend, longest)
    _tell(
        settings,
        model=f"{loaded.name}, weights {loaded.weights_form}, activations {loaded.activations_dtype}, K/V {cache}, "
        f"{backend.name} attention on {device}, {torch.get_num_threads()} threads",
        kernels=_describe_kernels(loaded),
        attention=choice.describe(),
        **({"kv_scales": scaling.describe()} if is_scaled(settings) else {}),
        deterministic="yes, in any batch" if variance is None else f"no: {variance}",
        speculation=_describe_speculation(settings),
        async_steps=_describe_async_steps(settings, device),
        cuda_graphs=prepared.graphs,
        sampling=drawing.line,
        **memory.describe(num_blocks, config.num_heads),
    )
    scheduling = SchedulerLimits(
        block_size=settings.block_size,
        max_sequences=settings.max_sequences,
        max_batched_tokens=settings.max_batched_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        policy=SchedulingPolicy(settings.scheduling_policy),
        speculative_tokens=settings.speculative_tokens,
        speculative_ngram=settings.speculative_ngram,
    )
    fingerprint = f"{loaded.name}:{loaded.fingerprint}:{_dtype_name(kv_dtype)}"
    if scaling.scales is not None:
        fingerprint += f":{scaling.scales.name}"
    options = EngineOptions(
        facts=PoolFacts(num_blocks, settings.block_size, memory.bytes_per_block, fingerprint),
        limits=scheduling,
        max_sequence_tokens=longest,
        eos_token_ids=frozenset(config.eos_token_ids) | frozenset(loaded.tokenizer.eos_token_ids),
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        async_steps=_are_async(settings, device),
    )
    return Setup(
        loaded=loaded,
        backend=backend,
        executor=prepared.executor,
        memory=memory,
        options=options,
        limits=Limits(config.vocab_size, longest, scheduling.slots),
        scaling=scaling,
        sampler=drawing.sampler,
    )


def _set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    kernels = native.library()
    if kernels is not None:
        kernels.set_threads(threads)


def _choose_sampler(settings: ModelRunnerSettings, device: torch.device, vocabulary: int) -> SamplerChoice:
    """Draws in the stream can be somebody else's; those that the engine waits for are ours."""
    name, is_cuda = settings.sampling_backend, device.type == "cuda"
    if name == "torch" or (name == "auto" and not is_cuda):
        return SamplerChoice(None, "octavo's own")
    if is_cuda and not _are_async(settings, device):
        return SamplerChoice(None, "octavo's own (not flashinfer: steps are not planned ahead)")
    return choose_sampler(device, vocabulary)


def _are_async(settings: ModelRunnerSettings, device: torch.device) -> bool:
    """On a CPU the planning of a step takes cores from the one that runs."""
    wanted = device.type == "cuda" if settings.async_steps == "auto" else settings.async_steps == "on"
    return wanted and not settings.speculative_tokens


def _describe_async_steps(settings: ModelRunnerSettings, device: torch.device) -> str:
    if settings.speculative_tokens and settings.async_steps == "on":
        return "off: guesses need the tokens before them"
    return "on" if _are_async(settings, device) else "off"


def _describe_speculation(settings: ModelRunnerSettings) -> str:
    tokens, ngram = settings.speculative_tokens, settings.speculative_ngram
    return f"up to {tokens} tokens a step, by n-grams of {ngram} and less" if tokens else "off"


def _describe_kernels(loaded: LoadedModel) -> str:
    """What computes: the instruction set and the forms of the weights, or why it is plain torch."""
    kernels = native.library()
    if kernels is None:
        return f"torch; {native.why_not()}"
    if not isinstance(loaded.model, NativeDecoder):
        return "torch"
    forms = ", ".join(f"{describe_bytes(size)} of {form}" for form, size in sorted(loaded.model.forms().items()))
    return f"{kernels.instruction_set}, weights held as {forms}"


def why_not_deterministic(model: Decoder | NativeDecoder, backend: AttentionBackend) -> str | None:
    """What makes a request's last bits depend on what is computed beside it; None when nothing does."""
    if not model.batch_invariant:
        return f"the model runs in plain torch on {backend.shape.device}, whose sums depend on the size of a batch"
    if not backend.batch_invariant:
        return f"the sums of --attention-backend {backend.name} depend on how a prompt is cut"
    return None


def _device(name: str) -> torch.device:
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError:
        raise StartupError(f"--device {name!r} is no device; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise StartupError(f"--device {name!r} is not there; this torch has {'cuda, ' * torch.cuda.is_available()}cpu.")
    if device.type == "cuda":
        # With its number it is the same device to whoever compares.
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


@contextmanager
def _progress(settings: ModelRunnerSettings, is_stopped: Callable[[], bool]) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr that shows bytes done, from the first tensor on; with JSON logs none."""
    columns = (TextColumn("Loading weights"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(file=sys.stderr), disable=settings.log_format == "json")
    task = progress.add_task("weights", total=None)

    def on_progress(done: int, total: int) -> None:
        if is_stopped():
            raise StartupError("The process was told to stop while it loaded the model.")
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield on_progress
    finally:
        # Without a terminal, stopping what never started would print an empty line.
        if progress.live.is_started:
            progress.stop()


def _tell(settings: ModelRunnerSettings, **facts: object) -> None:
    """What an operator wants to see of every start, whatever the log level."""
    if settings.log_format == "json":
        log.info("model is loaded", **facts)
        return
    for what, fact in facts.items():
        print(f"{what.replace('_', ' ')}: {fact}", file=sys.stderr)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
