"""Records the signatures of the calls that the GPU backends make, from the packages themselves.

    python -m tests.model_runner.record_signatures --fa2 FILE --fa3 FILE > tests/data/gpu_signatures.json

wants flashinfer-python to be importable, which needs no GPU, and two files of the repository Dao-AILab/flash-attention
that define its interfaces: flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py. Their text is read,
because they cannot be imported without a GPU's library.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

FLASHINFER = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__": "BatchDecodeWithPagedKVCacheWrapper.__init__",
    # plan() takes any keyword and hands it to this one.
    "BatchDecodeWithPagedKVCacheWrapper.plan": "BatchDecodeWithPagedKVCacheWrapper._plan_impl",
    "BatchDecodeWithPagedKVCacheWrapper.run": "BatchDecodeWithPagedKVCacheWrapper.run",
    "BatchPrefillWithPagedKVCacheWrapper.__init__": "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan": "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run": "BatchPrefillWithPagedKVCacheWrapper.run",
    "merge_state": "merge_state",
    "append_paged_kv_cache": "append_paged_kv_cache",
    "sampling_from_probs": "sampling_from_probs",
    "top_p_renorm_probs": "top_p_renorm_probs",
}
"""What is called, and what of FlashInfer says how."""


def text_of(function: Callable[..., Any]) -> str:
    """A function's parameters without their types: 'a, b=..., *, c=...'."""
    bare = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else ...)
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(bare))[1:-1].replace("Ellipsis", "...")


def text_in(source: str, name: str) -> str:
    """The same of a function in a module's text."""
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    for each in (*function.args.args, *function.args.kwonlyargs):
        each.annotation = None
    function.args.defaults = [ast.Constant(...) for _ in function.args.defaults]
    return ast.unparse(function.args)


def signature_from(text: str) -> inspect.Signature:
    """What text_of() and text_in() make of a signature, undone."""
    return inspect.signature(eval(f"lambda {text}: None"))


def flashinfer_signatures() -> dict[str, str]:
    """Of the package that is installed. Raises ImportError where there is none."""
    package = importlib.import_module("flashinfer")
    found = {}
    for called, defined in FLASHINFER.items():
        function: Any = package
        for part in defined.split("."):
            function = getattr(function, part)
        found[called] = text_of(function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fa2", type=Path, required=True)
    parser.add_argument("--fa3", type=Path, required=True)
    given = parser.parse_args()
    recorded = {
        "flashinfer_version": importlib.import_module("flashinfer").__version__,
        "flashinfer": flashinfer_signatures(),
        "flash_attn": {"flash_attn_varlen_func": text_in(given.fa2.read_text(), "flash_attn_varlen_func")},
        "flash_attn_interface": {"flash_attn_with_kvcache": text_in(given.fa3.read_text(), "flash_attn_with_kvcache")},
    }
    print(json.dumps(recorded, indent=1))


if __name__ == "__main__":
    main()
