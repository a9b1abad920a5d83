"""The demo model for peers that cannot read its 4-bit file: the same weights in float32.

python -m bench.serve.models gguf FILE      a GGUF file in float32
python -m bench.serve.models hf DIR FILE    a Hugging Face directory of such a file; needs transformers
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def write_float32_gguf(source: Path, target: Path) -> None:
    """Copies a GGUF file, all its weights dequantised."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, Keys, LlamaFileType, dequantize

    reader = GGUFReader(source)
    architecture = reader.get_field(Keys.General.ARCHITECTURE)
    assert architecture is not None
    writer = GGUFWriter(target, architecture.contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in (Keys.General.ARCHITECTURE, Keys.General.FILE_TYPE):
            continue
        subtype = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], subtype)
    writer.add_file_type(LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_hf_directory(source: Path, target: Path) -> None:
    """A float32 GGUF file of the Llama family as safetensors, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    loaded = AutoModelForCausalLM.from_pretrained(**given, dtype="float32")
    # What comes from a GGUF file counts as quantised and cannot be saved: a plain model takes the weights.
    del loaded.config.quantization_config
    plain = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(target)
    AutoTokenizer.from_pretrained(**given).save_pretrained(target)


def main() -> None:
    match sys.argv[1:]:
        case ["gguf", target]:
            from model_runner.loading import demo_model_path

            write_float32_gguf(demo_model_path(), Path(target))
        case ["hf", target, source]:
            write_hf_directory(Path(source), Path(target))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
