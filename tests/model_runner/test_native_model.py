"""Whole models on the CPU kernels: right, the same bits however a step is cut, and how far off each form is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner import native
from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.config import ModelConfig
from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError
from model_runner.gguf_file import GgufFile
from model_runner.gguf_weights import GgufWeights
from model_runner.loading import LoadedModel, demo_model_path, load_model
from model_runner.models.decoder import Decoder
from model_runner.models.native import EXACT, NativeDecoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.native_support import INSTRUCTION_SETS, PAIR_SETS, using
from tests.model_runner.test_families import CPU, FAMILIES, last_logits

needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")

SIZE = 16


def cache_for(c: ModelConfig, num_blocks: int, attention: str = "cpu", dtype: torch.dtype = torch.float32):
    shape = AttentionShape(
        c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, SIZE, num_blocks, dtype, CPU, c.sliding_window
    )
    return create_backend(attention, shape)


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
class TestFamilies:
    @pytest.mark.parametrize("chunk", [1, 7, 40])
    @pytest.mark.parametrize("attention", ["cpu", "cpu_torch", "reference"])
    def test_logits_are_those_of_transformers(self, tiny_models: Path, family: str, attention: str, chunk: int) -> None:
        assert_golden(tiny_models / family, attention, chunk)

    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_on_every_instruction_set(self, tiny_models: Path, family: str, instruction_set: str) -> None:
        with using(instruction_set):
            assert_golden(tiny_models / family, "cpu", 7)


def assert_golden(folder: Path, attention: str, chunk: int) -> None:
    config = config_from_hf(folder)
    model = NativeDecoder(config, SafetensorsWeights(folder), EXACT)
    for item in json.loads((folder / "golden.json").read_text()):
        backend = create_backend(
            attention,
            AttentionShape(
                config.num_layers,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                8,
                7,
                torch.float32,
                CPU,
                config.sliding_window,
            ),
        )
        backend.poison(range(7))
        logits = last_logits(model, backend, item["token_ids"], chunk)
        torch.testing.assert_close(logits, torch.tensor(item["logits"]), atol=1e-4, rtol=0)


class Steps:
    """Prompts in shuffled blocks of a poisoned cache, computed as the test says."""

    def __init__(self, model: NativeDecoder, prompts: list[list[int]], kv_dtype: torch.dtype = torch.float32) -> None:
        self.model, self.prompts, self.kv_dtype = model, prompts, kv_dtype
        self.counts = [-(-len(prompt) // SIZE) for prompt in prompts]

    def restart(self) -> None:
        draw = torch.Generator().manual_seed(0)
        order = iter((torch.randperm(sum(self.counts), generator=draw) + 1).tolist())
        self.tables = [[next(order) for _ in range(count)] for count in self.counts]
        self.backend: AttentionBackend = cache_for(self.model.config, sum(self.counts) + 1, dtype=self.kv_dtype)
        self.backend.poison(range(sum(self.counts) + 1))

    def run(self, steps: list[list[tuple[int, int, int]]]) -> dict[int, Tensor]:
        """Steps of (prompt, first token, end): the last logits of each prompt."""
        self.restart()
        last = {}
        for step in steps:
            entries = [
                BatchEntry(self.prompts[index][first:end], first, self.tables[index], True)
                for index, first, end in step
            ]
            logits = self.model.forward(pack_batch(entries, SIZE, CPU), self.backend)
            last |= {index: logits[row] for row, (index, _, _) in enumerate(step)}
        return last


@pytest.fixture(scope="module")
def smollm2_int8() -> LoadedModel:
    """SmolLM2 with its own weights and activations in 8 bits."""
    return load_model(demo_model_path(), activations_dtype="int8")


@needs_kernels
@pytest.mark.parametrize(
    ("model", "kv_dtype"),
    [
        ("smollm2", torch.float32),
        ("smollm2_int8", torch.float32),
        ("smollm2_int8", torch.bfloat16),
        ("smollm2_channel", torch.bfloat16),
    ],
)
def test_logits_are_the_same_bits_however_they_are_computed(
    model: str, kv_dtype: torch.dtype, request: pytest.FixtureRequest, golden_smollm2: list[dict[str, Any]]
) -> None:
    prompts = [(item["prompt_token_ids"] + item["output_ids"])[:70] for item in golden_smollm2[:5]]
    # One that is longer than a split of the context.
    prompts.append([token for item in golden_smollm2 for token in item["prompt_token_ids"]][:280])
    steps = Steps(request.getfixturevalue(model).model, prompts, kv_dtype)
    ends = [len(prompt) for prompt in prompts]
    whole = [[(index, 0, end) for index, end in enumerate(ends)]]
    expected = steps.run(whole)
    ways = {
        "alone": [[(index, 0, end)] for index, end in enumerate(ends)],
        "decoded at the end": [
            [(index, 0, end - 3) for index, end in enumerate(ends)],
            *[[(index, end - left, end - left + 1) for index, end in enumerate(ends)] for left in (3, 2, 1)],
        ],
        "in chunks": [
            [(index, first, min(first + 13, end)) for index, end in enumerate(ends) if first < end]
            for first in range(0, max(ends), 13)
        ],
    }
    for way, others in ways.items():
        for threads in (1, 2):
            with using(threads=threads):
                logits = steps.run(others)
            for index, row in expected.items():
                assert torch.equal(logits[index], row), f"{way}, {threads} threads, prompt {index}"


@pytest.mark.skipif(not PAIR_SETS, reason="this CPU has no products of pairs of bfloat16")
def test_rounded_activations_and_bfloat16_kv_let_attention_round(
    smollm2_int8: LoadedModel, golden_smollm2: list[dict[str, Any]]
) -> None:
    """By less than rounding the activations does: an error of 0.062, where float32 K/V leave everything as it is."""
    with using("avx512vnni"):
        without = load_model(demo_model_path(), activations_dtype="int8").model
    prompt = golden_smollm2[0]["prompt_token_ids"]
    logits = {}
    for dtype in (torch.float32, torch.bfloat16):
        for model in (smollm2_int8.model, without):
            logits[dtype, model] = Steps(model, [prompt], dtype).run([[(0, 0, len(prompt))]])[0]
    assert torch.equal(logits[torch.float32, smollm2_int8.model], logits[torch.float32, without])
    difference = logits[torch.bfloat16, smollm2_int8.model] - logits[torch.bfloat16, without]
    assert 0 < difference.pow(2).mean().sqrt() < 0.062 * logits[torch.bfloat16, without].std()


@needs_kernels
@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("wanted", [(0, 3, 5), (1, 1, 1), (9, 0, 0), (0, 0, 0)])
def test_rows_whose_logits_nobody_wants(tiny_models: Path, attention: str, wanted: tuple[int, ...]) -> None:
    """The last layer leaves them out behind K and V: what is wanted stays the same bits, now and in the next step."""
    folder = tiny_models / "llama"
    model = NativeDecoder(config_from_hf(folder), SafetensorsWeights(folder))
    prompts = [list(range(first, first + count)) for first, count in ((3, 9), (40, 7), (90, 5))]

    def steps(counts: Sequence[int]) -> list[Tensor]:
        """Logits of the last `counts` rows of each prompt, then those of one token more of each."""
        backend = cache_for(model.config, 4, attention)
        prefill = [
            BatchEntry(prompt, 0, [row + 1], count)
            for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
        ]
        decode = [BatchEntry([7], len(prompt), [row + 1], 1) for row, prompt in enumerate(prompts)]
        return [model.forward(pack_batch(entries, SIZE, CPU), backend) for entries in (prefill, decode)]

    everything, later = steps([len(prompt) for prompt in prompts])
    ends = [9, 16, 21]
    rows = [row for end, count in zip(ends, wanted, strict=True) for row in range(end - count, end)]
    logits, then = steps(wanted)
    assert torch.equal(logits, everything[rows])
    assert torch.equal(then, later)


@needs_kernels
def test_weights_as_the_file_has_them_give_the_bits_of_float32(
    smollm2: LoadedModel, golden_smollm2: list[dict[str, Any]]
) -> None:
    """Q4_1 layers and a Q8_0 embedding take a fifth of the memory of float32, and lose nothing."""
    plain = load_model(demo_model_path(), weights_dtype="float32")
    assert smollm2.fingerprint == plain.fingerprint
    assert set(smollm2.model.forms()) == {"int4", "int8"}
    assert set(plain.model.forms()) == {"float32"}
    assert smollm2.model.weights_bytes < 0.2 * plain.model.weights_bytes
    prompts = [item["prompt_token_ids"] for item in golden_smollm2]
    whole = [[(index, 0, len(prompt)) for index, prompt in enumerate(prompts)]]
    ours, theirs = (torch.stack(list(Steps(each.model, prompts).run(whole).values())) for each in (smollm2, plain))
    assert torch.equal(ours, theirs)


@needs_kernels
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_what_the_file_has_in_4_bits_is_not_rounded_again(smollm2: LoadedModel, form: str) -> None:
    assert load_model(demo_model_path(), weights_dtype=form).model.forms() == smollm2.model.forms()


class Dequantised(GgufWeights):
    """The same values as if the file had them in float32."""

    def load_exact(self, name: str) -> Tensor:
        return self.load(name)


@needs_kernels
@pytest.mark.parametrize(("form", "most"), [("bfloat16", 0.03), ("int8", 0.12), ("int8_channel", 0.16)])
def test_the_error_of_rounding(
    smollm2: LoadedModel, golden_smollm2: list[dict[str, Any]], record_property: Any, form: str, most: float
) -> None:
    """Root mean square of the error of the logits over that of the logits themselves (less their mean).

    bfloat16 has 8 bits for each weight on its own, int8 for the largest of 32, int8_channel for the largest of a row.
    """
    reader = GgufFile(demo_model_path())
    rounded = NativeDecoder(smollm2.config, Dequantised(reader, smollm2.config), form)
    assert set(rounded.forms()) == {form}
    error = error_of_logits(rounded, smollm2.model, golden_smollm2)
    record_property(f"logit error of {form}", error)
    print(f"logit error of {form}: {error:.4f}")
    assert error < most


def error_of_logits(model: NativeDecoder, exact: NativeDecoder, golden: list[dict[str, Any]]) -> float:
    prompts = [item["prompt_token_ids"] for item in golden]
    whole = [[(index, 0, len(prompt)) for index, prompt in enumerate(prompts)]]
    ours, theirs = (torch.stack(list(Steps(each, prompts).run(whole).values())) for each in (model, exact))
    spread = (theirs - theirs.mean(dim=1, keepdim=True)).pow(2).mean().sqrt()
    return ((ours - theirs).pow(2).mean().sqrt() / spread).item()


@needs_kernels
def test_the_error_of_rounded_activations(
    smollm2: LoadedModel, smollm2_int8: LoadedModel, golden_smollm2: list[dict[str, Any]], record_property: Any
) -> None:
    """As much as rounding all weights to 8 bits: both round to the 127th part of the largest of 32."""
    assert smollm2_int8.activations_dtype == "int8"
    assert smollm2_int8.model.forms() == smollm2.model.forms()
    assert smollm2_int8.fingerprint != smollm2.fingerprint
    error = error_of_logits(smollm2_int8.model, smollm2.model, golden_smollm2)
    record_property("logit error of int8 activations", error)
    print(f"logit error of int8 activations: {error:.4f}")
    assert 0 < error < 0.12


@needs_kernels
def test_int4_of_other_weights_rounds_layers_to_4_bits_and_the_head_to_8(tiny_models: Path) -> None:
    model = NativeDecoder(config_from_hf(tiny_models / "qwen2"), SafetensorsWeights(tiny_models / "qwen2"), "int4")
    assert set(model.forms()) <= {"int4", "int8", "float32"}
    assert "int4" in model.forms()


@needs_kernels
def test_bfloat16_files_stay_bfloat16(tiny_models: Path) -> None:
    """A checkpoint in bfloat16 is held as it is, and computes what its float32 values would."""

    class Rounded(SafetensorsWeights):
        def load(self, name: str) -> Tensor:
            return super().load(name).bfloat16()

    folder = tiny_models / "llama"
    config, weights = config_from_hf(folder), Rounded(folder)
    held, plain = NativeDecoder(config, weights), NativeDecoder(config, weights, "float32")
    assert set(held.forms()) == {"bfloat16"}
    logits = [last_logits(model, replaced_cache(config), list(range(30)), 30) for model in (held, plain)]
    assert torch.equal(*logits)


def replaced_cache(config: ModelConfig) -> AttentionBackend:
    shape = cache_for(config, 7).shape
    return create_backend("cpu", replace(shape, block_size=8))


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident size is read from /proc")
def test_steps_neither_move_the_cache_nor_take_more_memory(smollm2: LoadedModel) -> None:
    """The pool is allocated once, and what a step needs besides grows with the largest step only."""
    backend = cache_for(smollm2.config, 20)
    places = backend.keys.data_ptr(), backend.values.data_ptr()
    batch = pack_batch([BatchEntry([5] * 64, 0, [3, 1, 2, 4], True)], SIZE, CPU)
    resident = []
    for _ in range(40):
        smollm2.model.forward(batch, backend)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    assert (backend.keys.data_ptr(), backend.values.data_ptr()) == places
    assert (backend.cache.keys, backend.cache.values) == places
    # A step's activations: 64 rows of 30 layers would be 24 MiB if they were not used again. Over 30 steps half a MiB a
    # step is too much; on a slow machine the kernel puts a few huge pages of weights and cache together meanwhile.
    assert resident[-1] - resident[9] < 15 << 20


@needs_kernels
class TestRefusals:
    def test_a_token_that_is_not_there(self, smollm2: LoadedModel) -> None:
        for token in (-1, smollm2.config.vocab_size):
            with pytest.raises(native.NativeError, match=f"no token {token}"):
                Steps(smollm2.model, [[token]]).run([[(0, 0, 1)]])

    def test_a_cache_of_another_model(self, smollm2: LoadedModel) -> None:
        backend = cache_for(replace(smollm2.config, num_kv_heads=1), 3)
        with pytest.raises(native.NativeError, match="another model"):
            smollm2.model.forward(pack_batch([BatchEntry([1], 0, [1], True)], SIZE, CPU), backend)

    def test_rounded_activations_where_no_weights_are_in_groups(self) -> None:
        with pytest.raises(ModelLoadError, match="need weights in 8 or 4 bits, and here are none"):
            load_model(demo_model_path(), weights_dtype="bfloat16", activations_dtype="int8")


class TestWithout:
    """Where there are no kernels."""

    def test_torch_computes(self, smollm2_in_torch: LoadedModel) -> None:
        assert isinstance(smollm2_in_torch.model, Decoder)

    @pytest.mark.parametrize("form", native.WHOLE_FORMS)
    def test_small_forms_are_refused_with_the_reason(self, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
        monkeypatch.setattr("model_runner.loading.library", lambda: None)
        monkeypatch.setattr("model_runner.loading.why_not", lambda: "they were not built")
        with pytest.raises(ModelLoadError, match=f"{form} need the CPU kernels, and they were not built"):
            load_model(demo_model_path(), weights_dtype=form)

    def test_rounded_activations_are_refused_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_runner.loading.library", lambda: None)
        monkeypatch.setattr("model_runner.loading.why_not", lambda: "they were not built")
        with pytest.raises(ModelLoadError, match=r"^Activations of type int8 need the CPU kernels, and they were"):
            load_model(demo_model_path(), activations_dtype="int8")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "were not built: there was no C\\+\\+ compiler"), (b"no library", "cannot be used: ")],
    )
    def test_why_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, reason: str) -> None:
        path = tmp_path / "liboctavo.so"
        if content is not None:
            path.write_bytes(content)
        monkeypatch.setattr(native, "PATH", path)
        monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
        with pytest.raises(native.NativeError, match=reason):
            raise native.NativeError(native._loaded.__wrapped__())

    def test_turned_off(self) -> None:
        code = (
            "from model_runner import native; from model_runner.attention import *; import torch;"
            "shape = AttentionShape(1, 1, 1, 8, 8, 2, torch.float32, torch.device('cpu'));"
            "print(native.why_not(), create_backend('auto', shape).name, create_backend('cpu', shape).name)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"OCTAVO_NATIVE": "0", "PATH": "", "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "OCTAVO_NATIVE=0 turns the CPU kernels off cpu_torch cpu_torch"
