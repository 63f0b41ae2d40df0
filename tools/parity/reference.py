"""Regenerate the reference of the default model: what transformers generates greedily, in float32.

    python -m tools.parity.reference [--output tests/model/data/smollm2_reference.json] [--new-tokens 32]

transformers loads the GGUF file with a loader of its own, so that the comparison covers our conversion as
well as our forward. Each prompt runs alone; beside each token stands the gap between the two largest
logits, which tells a tie from a mistake.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from mstar.model.pull import fetch_gguf
from mstar.model.registry import REGISTRY
from tools.parity.prompts import CHATS, TEXTS

__all__ = ["main"]

_MODEL = "smollm2-135m-instruct"


def main() -> None:
    """Fetch the GGUF file, generate, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path("tests/model/data/smollm2_reference.json"))
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gguf = fetch_gguf(REGISTRY[_MODEL], Path(scratch), lambda stage, done, total: None)
        model, tokenizer = _load(gguf)
    rows = []
    chats = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CHATS]
    for number, (kind, text) in enumerate([*(("chat", c) for c in chats), *(("text", t) for t in TEXTS)]):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, gaps = _generate(model, ids, options.new_tokens)
        rows.append({"kind": kind, "text": text, "prompt": ids, "tokens": tokens, "gaps": gaps})
        print(f"{number + 1:3d} {kind} {tokenizer.decode(tokens)!r}", flush=True)
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    body = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps({"model": _MODEL, "sha256": REGISTRY[_MODEL].sha256, **versions})
    options.output.write_text(f'{head[:-1]}, "rows": [\n{body}\n]}}\n', encoding="utf-8")


def _load(gguf: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=dense)
    return model.eval(), AutoTokenizer.from_pretrained(**where)


def _generate(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    gaps: list[float] = []
    new, cache = prompt, None
    with torch.inference_mode():
        for _ in range(count):
            out = model(input_ids=torch.tensor([new]), cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            top = out.logits[0, -1].topk(2)
            new = [int(top.indices[0])]
            tokens += new
            gaps.append(float(f"{float(top.values[0] - top.values[1]):.3g}"))
    return tokens, gaps


if __name__ == "__main__":
    main()
