"""The transformers side, in a process of its own: a question a line on stdin, an answer a line on stdout."""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

__all__ = ["answer", "main"]

PAGE = 32  # tokens a page of continuous batching; its 256 would leave most of a short sequence's page empty


def main(directory: str, dtype: str) -> None:
    """Serve questions until stdin ends."""
    # What the library prints must not be taken for an answer.
    answers: IO[bytes] = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(answer(model, msgspec.json.decode(line))) + b"\n")
        answers.flush()


def answer(model: PreTrainedModel, question: dict[str, Any]) -> dict[str, Any]:
    """Do what ``question`` asks and tell tokens, seconds and CPU seconds; an error is told as one."""
    if question["mode"] == "about":
        return {
            "transformers": transformers.__version__,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "attention": model.config._attn_implementation,
            "weight_bytes": sum(weight.nbytes for weight in model.parameters()),
            "read_bytes_per_second": read_bandwidth(),
        }
    modes = {"generate": _one_by_one, "static": _static, "continuous": _continuous}
    cpu, begun = time.process_time(), time.perf_counter()
    try:
        with torch.inference_mode():
            tokens = modes[question["mode"]](model, question["prompts"], question["new_tokens"])
    except Exception as error:  # noqa: BLE001  any failure of the peer is its result
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    wanted = len(question["prompts"]) * question["new_tokens"]
    if tokens != wanted:
        return {"error": f"{tokens} tokens came instead of {wanted}"}
    return {"tokens": tokens, "seconds": seconds, "cpu_seconds": used}


def read_bandwidth() -> float:
    """Bytes a second that summing 512 MiB reads: the best of five."""
    values = torch.ones(128 << 20, dtype=torch.float32)
    best = 0.0
    for _ in range(5):
        begun = time.perf_counter()
        values.sum()
        best = max(best, values.nbytes / (time.perf_counter() - begun))
    return best


def _one_by_one(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> int:
    return sum(_static(model, [prompt], new_tokens) for prompt in prompts)


def _static(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> int:
    ids = torch.tensor(prompts)
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return int(whole.shape[0] * (whole.shape[1] - ids.shape[1]))


def _continuous(model: PreTrainedModel, prompts: list[list[int]], new_tokens: int) -> int:
    longest = max(map(len, prompts)) + new_tokens
    pages = -(-longest // PAGE) + 1
    # Without an accelerator the library cannot measure what memory there is: its sizes must be given.
    cache = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=pages * len(prompts),
        max_batch_tokens=sum(map(len, prompts)),
        max_requests_per_batch=len(prompts),
    )
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # The manager persists: its set-up is paid in the warm-up run, as a server pays it once.
    outputs = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=cache, persistent_manager=True
    )
    failed = [output.error for output in outputs.values() if output.error]
    if failed:
        raise RuntimeError(failed[0])
    return sum(len(output.generated_tokens) for output in outputs.values())


if __name__ == "__main__":
    main(*sys.argv[1:])
