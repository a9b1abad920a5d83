"""Captured decode steps against steps that are not, with a graph that works as CUDA's does, on a CPU.

It keeps every operation with the very tensors that it had, and replays them: what Python does around them is not
repeated. So whatever a plan puts elsewhere, a replay doesn't see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from model_runner.attention import AttentionBackend, AttentionShape, flashinfer
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.attention.triton import Tiling, TritonAttention
from model_runner.batch import BatchEntry, StepBatch
from model_runner.decode_graphs import DecodeGraphs, padded_sizes
from model_runner.executor import TorchExecutor
from model_runner.kv_scales import KvScales
from tests.model_runner import gpu_doubles
from tests.model_runner.attention_world import CPU

VOCABULARY = 50
WIDTH = 6
"""Blocks of the longest sequence, of 8 tokens each."""


class CpuGraph(TorchDispatchMode):
    """What is computed while it is entered can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._is_paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._is_paused:
            self._calls.append((function, args, kwargs or {}, result))
        return result

    def opaque(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as one operation, like a kernel: while this is entered, its calls are kept whole."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            result = function(*args, **kwargs)
            self._is_paused = before
            self._calls.append((function, args, kwargs, result))
            return result

        return call

    def replay(self) -> None:
        for function, args, kwargs, before in list(self._calls):
            result = function(*args, **kwargs)
            for old, new in zip(_pytree.tree_leaves(before), _pytree.tree_leaves(result), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Kernels:
    """Triton's kernels, each launch one operation of the graph that is being captured."""

    def __init__(self, kernels: Any) -> None:
        self._real = kernels
        self.graph: CpuGraph | None = None

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        return _Launcher(self, real) if name in ("attend", "merge", "write", "copy_blocks") else real


class _Launcher:
    def __init__(self, kernels: Kernels, real: Any) -> None:
        self._kernels, self._real = kernels, real

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        launch: Callable[..., None] = self._real[grid]
        return launch if self._kernels.graph is None else self._kernels.graph.opaque(launch)


class Model:
    """Logits are what attention makes, in all layers together, of rows that belong to the token."""

    def __init__(self, shape: AttentionShape) -> None:
        draw = torch.Generator().manual_seed(5)
        self._tables = [
            torch.randn(VOCABULARY, heads, shape.head_dim, generator=draw).to(shape.query_dtype)
            for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        ]
        self.computed = 0

    def forward(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        backend.plan(batch)
        return self.compute(batch, backend)

    def compute(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        self.computed += 1
        turned = 1 + batch.positions[:, None, None].to(self._tables[0].dtype) / 64
        rows = [table[batch.token_ids] * turned for table in self._tables]
        layers = [backend.run(layer, *rows) for layer in range(backend.shape.num_layers)]
        return torch.stack(layers).sum(dim=0).flatten(1)[batch.logits_rows].float()


class Rig:
    """The same requests with graphs and without, on backends of one kind."""

    def __init__(self, name: str, window: int | None = None, scales: KvScales | None = None) -> None:
        """scales: of two layers whose cache has 8 bits."""
        dtype = torch.float16 if name == "flashinfer" or scales else torch.float32
        self.shape = AttentionShape(1, 4, 2, 64, 8, 40, dtype, CPU, sliding_window=window, query_dtype=dtype)
        if scales is not None:
            self.shape = replace(self.shape, num_layers=2, kv_dtype=torch.float8_e4m3fn, scales=scales)
        self._tolerance = 5e-3 if dtype is torch.float16 else 1e-5
        self.backend = self._make(name)
        self.model, self.captures = Model(self.shape), 0
        self._graphs = DecodeGraphs(self.model, self.backend, 12, WIDTH, self._capture)
        self.with_graphs = TorchExecutor(self.model, self.backend, 8, CPU, self._graphs)
        # Triton's interpreter does not round to 8 bits as torch does.
        plain = self._make(name) if scales else ReferenceAttention(self.shape)
        self.without = TorchExecutor(self.model, plain, 8, CPU)

    def step(self, entries: list[BatchEntry]) -> None:
        """Computes the step on both, and compares."""
        actual, expected = (each.execute(entries, []) for each in (self.with_graphs, self.without))
        torch.testing.assert_close(actual, expected, rtol=0, atol=self._tolerance)

    def _make(self, name: str) -> AttentionBackend:
        if name == "flashinfer":
            return FlashInferAttention(self.shape, gpu_doubles.flashinfer, workspace_bytes=16)
        backend = TritonAttention(self.shape, Tiling(rows=16, keys=16, part=16))
        backend._kernels = Kernels(backend._kernels)
        return backend

    def _capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.captures += 1
        graph = CpuGraph()
        with pytest.MonkeyPatch.context() as patched, graph:
            if isinstance(self.backend, TritonAttention):
                patched.setattr(self.backend._kernels, "graph", graph)
            else:
                api = gpu_doubles.flashinfer
                patched.setattr(api, "append_paged_kv_cache", graph.opaque(api.append_paged_kv_cache))
                (part,) = self.backend._parts
                patched.setattr(self.backend, "_parts", [replace(part, run=graph.opaque(part.run))])
            output = compute()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


BACKENDS = [
    "flashinfer",
    pytest.param("triton", marks=pytest.mark.skipif(TritonAttention.why_not_here(CPU) is not None, reason="no Triton")),
]


def prompts(rig: Rig) -> list[list[int]]:
    """Three sequences of 20, 3 and 9 tokens, computed; their block tables."""
    tables = [[3, 7, 1, 11, 12, 13], [5, 2], [9, 4, 8]]
    lengths = (20, 3, 9)
    rig.step([BatchEntry(list(range(count)), 0, table, True) for count, table in zip(lengths, tables, strict=True)])
    return tables


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("window", "scales"), [(None, None), (6, None), (None, KvScales((0.05, 0.3), (0.02, 0.4)))], ids=str
)
def test_replays_are_steps(name: str, window: int | None, scales: KvScales | None) -> None:
    """A graph keeps each layer's scales, for the plan has none."""
    rig = Rig(name, window, scales)
    tables = prompts(rig)
    positions = [20, 3, 9]
    # Who takes part, in which order; the last step is past 40 tokens, in more parts than the first.
    for who in ([0, 1, 2], [2, 0, 1], [0, 1, 2], [1, 0, 2], *[[0]] * 18):
        rig.step([BatchEntry([7 + row], positions[row], tables[row], True) for row in who])
        for row in who:
            positions[row] += 1
    # Three sequences are padded to four.
    assert rig.captures == 2


@pytest.mark.parametrize("name", BACKENDS)
def test_nothing_is_computed_but_by_replaying(name: str) -> None:
    rig = Rig(name)
    tables = prompts(rig)
    rig.step([BatchEntry([7], 20, tables[0], True)])
    computed = rig.model.computed
    rig.with_graphs.execute([BatchEntry([8], 21, tables[0], True)], [])
    assert rig.model.computed == computed


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_writes_to_the_null_block_alone(name: str) -> None:
    rig = Rig(name)
    tables = prompts(rig)
    entries = [BatchEntry([7], position, table, True) for position, table in zip((20, 3, 9), tables, strict=True)]
    rig.with_graphs.execute(entries, [])
    before = rig.backend.keys.clone()
    rig.backend.keys[:, 0] = before[:, 0] = float("nan")
    rig.with_graphs.execute(entries, [])
    written = rig.backend.keys[0, 0].isfinite().any(dim=-1).any(dim=-1)
    assert written.tolist() == [True] + [False] * 7
    assert torch.equal(rig.backend.keys[:, 1:], before[:, 1:])


class TestWhatGraphsTake:
    @pytest.mark.parametrize(
        ("entries", "taken"),
        [
            ([BatchEntry([1], 5, [1], True)], True),
            ([BatchEntry([1], 5, [1], True)] * 12, True),
            # Twelve are padded to sixteen, so there is room for more.
            ([BatchEntry([1], 5, [1], True)] * 17, False),
            ([BatchEntry([1, 2], 5, [1], True)], False),
            ([BatchEntry([1], 5, [1], True), BatchEntry([1, 2], 0, [2], True)], False),
            ([BatchEntry([1], 5, [1], False)], False),
            ([BatchEntry([1], 5, list(range(1, WIDTH + 2)), True)], False),
        ],
    )
    def test_steps(self, entries: list[BatchEntry], taken: bool) -> None:
        assert Rig("flashinfer")._graphs.takes(entries) is taken

    def test_no_step_that_gains_from_a_plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rig = Rig("flashinfer")
        entries = [BatchEntry([1], 40, [3, 7, 1, 11, 12, row], True) for row in range(13, 18)]
        assert rig._graphs.takes(entries)
        # Five blocks that five sequences share, of 2 (K, V) x 8 tokens x 2 heads x 64 dimensions x 2 bytes each.
        monkeypatch.setattr(flashinfer, "CASCADE_INSTEAD_OF_GRAPH", 4 * 5 * 4096)
        assert not rig._graphs.takes(entries)
        monkeypatch.setattr(flashinfer, "CASCADE_INSTEAD_OF_GRAPH", 4 * 5 * 4096 + 1)
        assert rig._graphs.takes(entries)

    @pytest.mark.parametrize(
        ("most", "sizes"),
        [
            (1, [1]),
            (2, [1, 2]),
            (3, [1, 2, 3]),
            (4, [1, 2, 4]),
            (5, [1, 2, 4, 8]),
            (8, [1, 2, 4, 8]),
            (9, [1, 2, 4, 8, 16]),
            (24, [1, 2, 4, 8, 16, 24]),
        ],
    )
    def test_sizes(self, most: int, sizes: list[int]) -> None:
        assert padded_sizes(most) == sizes

    def test_a_backend_without(self) -> None:
        backend = ReferenceAttention(Rig("flashinfer").shape)
        assert not backend.is_capturable
        with pytest.raises(NotImplementedError, match="reference"):
            backend.plan_replay(None)
