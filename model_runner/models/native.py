"""The Llama family on the CPU kernels: weights packed once, a whole step in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend
from model_runner.attention.cpu import CpuAttention
from model_runner.batch import StepBatch
from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.models.parts import LayerParts, Part, TensorLoader, layer_parts, refuse_more_layers, whole_parts
from model_runner.models.rope import Rope, RopeTable
from model_runner.native import (
    ACTIVATIONS,
    GATED_BLOCK,
    GROUP,
    WHOLE_FORMS,
    CBatch,
    CLayer,
    CModel,
    Matrix,
    c_batch,
    need_library,
)
from model_runner.weights import Grouped, WeightSource

EXACT = "exact"
"""Each matrix in the smallest form that holds what the file has: the same results as float32, bit by bit."""


class NativeDecoder:
    """A loaded model for CPUs; forward() as the torch Decoder's, in float32 arithmetic unless activations are int8.

    A row's logits are the same bit by bit in any batch, in any chunks and with any number of threads. One step at a
    time: activations live in the library, with the model.
    """

    batch_invariant = True

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        form: str = EXACT,
        on_progress: Callable[[int, int], None] | None = None,
        activations: str = "float32",
    ) -> None:
        """form: of model_runner.native.FORMS, or EXACT. Raises ModelLoadError as the torch Decoder does.

        activations: of model_runner.native.ACTIVATIONS. int8 concerns the matrices that are held in WHOLE_FORMS; where
        there are none, it is refused with ModelLoadError.

        int8_channel rounds every matrix from the values that the file has, whatever their form. For int8, what the file
        has in groups of 4 bits stays so: rounding it again would cost memory and accuracy. For int4, the embedding and
        the output head take 8 bits unless the file has them in 4. A matrix whose inputs cannot be divided into a form's
        groups stays in float32.
        """
        self._library = need_library()
        self.config = c = config
        self._form, self._activations = form, activations
        refuse_more_layers(weights, c.num_layers)
        loader = TensorLoader(weights, on_progress, lambda tensor: tensor.to(torch.float32).contiguous())
        self._kept: list[Tensor | Matrix] = []
        whole = whole_parts(c)
        embedding = self._matrix(loader, [whole.embedding], at_least_8_bits=True)
        layers = [self._layer(loader, layer_parts(c, index)) for index in range(c.num_layers)]
        norm = self._vector(loader, [whole.norm])
        head = self._matrix(loader, [whole.head], at_least_8_bits=True) if whole.head else embedding
        if activations == "int8" and not self.forms().keys() & set(WHOLE_FORMS):
            raise ModelLoadError(
                "Activations of type int8 need weights in 8 or 4 bits, and here are none; add --weights-dtype int8."
            )
        self._rope = RopeTable(Rope(c, torch.device("cpu"), weights.rope_freq_factors()))
        self._model = self._library.call(
            "octavo_model_new",
            byref(
                CModel(
                    c.num_layers,
                    c.hidden_size,
                    c.intermediate_size,
                    c.num_heads,
                    c.num_kv_heads,
                    c.head_dim,
                    c.rms_norm_eps,
                    ACTIVATIONS.index(activations),
                    embedding,
                    norm,
                    head,
                    (CLayer * len(layers))(*layers),
                )
            ),
        )

    def __del__(self) -> None:
        if hasattr(self, "_model"):
            self._library.run("octavo_model_free", self._model)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights as they are held."""
        return sum(kept.bytes if isinstance(kept, Matrix) else kept.nbytes for kept in self._kept)

    def forms(self) -> Counter[str]:
        """Bytes of the matrices by the form that they are held in."""
        matrices = [kept for kept in self._kept if isinstance(kept, Matrix)]
        return Counter({form: sum(m.bytes for m in matrices if m.form == form) for form in {m.form for m in matrices}})

    def forward(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        """Logits of batch.logits_rows: float32 [R, vocab_size]. Writes the K/V of all rows into the backend."""
        cos, sin = self._rope.at(batch.positions, max(batch.lengths))
        step = c_batch(batch, cos, sin)
        logits = torch.empty(len(batch.logits_rows), self.config.vocab_size)
        if isinstance(backend, CpuAttention):
            self._library.call("octavo_forward", self._model, byref(step), byref(backend.cache), logits.data_ptr())
        else:
            backend.plan(batch)
            self._forward_around(step, len(batch.token_ids), backend, logits)
        return logits

    def _forward_around(self, step: CBatch, num_tokens: int, backend: AttentionBackend, logits: Tensor) -> None:
        """The step with attention computed by another backend."""
        c = self.config
        qkv = torch.empty(num_tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        self._library.call("octavo_begin", self._model, byref(step))
        for index in range(c.num_layers):
            self._library.call("octavo_before_attention", self._model, byref(step), index, qkv.data_ptr())
            queries, keys, values = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            attended = backend.run(index, queries.contiguous(), keys, values).contiguous()
            self._library.call("octavo_after_attention", self._model, byref(step), index, attended.data_ptr())
        self._library.call("octavo_end", self._model, byref(step), logits.data_ptr())

    def _layer(self, loader: TensorLoader, parts: LayerParts) -> CLayer:
        return CLayer(
            input_norm=self._vector(loader, [parts.input_norm]),
            qkv=self._matrix(loader, parts.qkv),
            qkv_bias=self._vector(loader, parts.qkv_bias) if parts.qkv_bias else None,
            q_norm=self._vector(loader, [parts.q_norm]) if parts.q_norm else None,
            k_norm=self._vector(loader, [parts.k_norm]) if parts.k_norm else None,
            output=self._matrix(loader, [parts.output]),
            mlp_norm=self._vector(loader, [parts.mlp_norm]),
            gate_up=self._matrix(loader, parts.gate_up, block=GATED_BLOCK),
            down=self._matrix(loader, [parts.down]),
        )

    def _vector(self, loader: TensorLoader, parts: Sequence[Part]) -> int:
        """Keeps norms or biases, one after the other, and returns their address."""
        vector = loader.stacked(parts)
        self._kept.append(vector)
        return vector.data_ptr()

    def _matrix(
        self, loader: TensorLoader, parts: Sequence[Part], *, at_least_8_bits: bool = False, block: int | None = None
    ) -> int:
        """Packs matrices, stacked to one, and returns the handle. block: by turns, so many outputs of each."""
        stored = [loader.exact(*part) for part in parts]
        inputs = parts[0][1][1]
        form, outputs = self._form_for(stored, inputs, at_least_8_bits), sum(shape[0] for _, shape in parts)
        matrix = Matrix(form, outputs, inputs, self._activations)
        first = 0
        for each in stored if block is None else _by_turns(stored, block):
            if isinstance(each, Grouped) and each.form == matrix.form:
                matrix.fill_groups(first, each.numbers, each.scales, each.offsets)
                first += len(each.numbers)
            else:
                weights = each.dequantized() if isinstance(each, Grouped) else each
                matrix.fill(first, weights)
                first += len(weights)
        self._kept.append(matrix)
        return matrix.handle

    def _form_for(self, stored: Sequence[Tensor | Grouped], inputs: int, at_least_8_bits: bool) -> str:
        exact = {_exact_form(each) for each in stored}
        form = self._form
        if form == EXACT:
            form = exact.pop() if len(exact) == 1 else "float32"
        elif form == "int8" and exact == {"int4"}:
            form = "int4"
        elif form == "int4" and at_least_8_bits and exact != {"int4"}:
            form = "int8"
        divisor = {"float32": 1, "bfloat16": 2}.get(form, GROUP)
        return "float32" if inputs % divisor else form


def _by_turns(stored: Sequence[Tensor | Grouped], block: int) -> Iterator[Tensor | Grouped]:
    """Matrices of one shape, `block` rows of each at a time; the last block is what is left."""
    outputs = max(len(each if isinstance(each, Tensor) else each.numbers) for each in stored)
    for first in range(0, outputs, block):
        chosen = slice(first, first + block)
        for each in stored:
            yield each[chosen] if isinstance(each, Tensor) else each.rows(chosen)


def _exact_form(stored: Tensor | Grouped) -> str:
    if isinstance(stored, Grouped):
        return stored.form
    return "bfloat16" if stored.dtype == torch.bfloat16 else "float32"
