"""Measures a captured decode step driven by one slot vector on one GPU (Qwen3-0.6B's shape, random weights).

    python -m tools.bench.slot_decode OUT.json [--quick]

Checks first (rows that join and leave against an eager reference; a planned work list that must survive the
next plan), then times: device and host time a step, the device's idle gaps, planning, polling the word.
Needs flashinfer-python and an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.bench.slot_decode import probes
from tools.bench.slot_decode.attention import FLOAT_WORKSPACE, FlashInferAttention
from tools.bench.slot_decode.check import Conversation, Join
from tools.bench.slot_decode.loop import PAGE, PAGES, Bench
from tools.bench.slot_decode.model import QWEN3_06B, random_weights
from tools.bench.slot_decode.state import Rows, Shape, SlotState

SMALL = Shape(2, 256, 4, 2, 128, 512, 1024, 2048, tied=False)


def check_tokens(*, tensor_cores: bool, horizon: int) -> dict[str, Any]:
    """Rows join and leave over 120 steps and three buckets; NaN and -1 lie wherever nothing was written."""
    weights = random_weights(SMALL, torch.bfloat16, "cuda", 1)
    state = SlotState(SMALL, 16, 400, 80, PAGE, torch.bfloat16, "cuda")
    workspace = torch.empty(FLOAT_WORKSPACE, dtype=torch.uint8, device="cuda")
    changed = []

    class Watched(FlashInferAttention):
        """The captured graph holds the first plan's layout: every later plan must give the same one."""

        def plan(self, indptr: np.ndarray) -> None:
            super().plan(indptr)
            if list(self.last_info) != self.info:
                changed.append((self.info, list(self.last_info)))

    def attention(rows: Rows) -> Watched:
        return Watched(rows, state, SMALL, workspace, tensor_cores=tensor_cores)

    talk = Conversation(SMALL, weights, state, (1, 8, 32), attention, seed=1, horizon=horizon)
    random = np.random.default_rng(2)
    joins = {0: Join(9, 1, 130), 2: Join(3, 700, 130), 3: Join(12, 15, 130), 4: Join(0, 16, 130)}
    joins |= {
        6 + 2 * i: Join(slot, int(random.integers(1, 500)), 130) for i, slot in enumerate((5, 7, 1, 2, 4))
    }
    leaves = {30: 3, 40: 12, 50: 5, 52: 7, 54: 1, 56: 2, 58: 4, 100: 9}
    joins |= {60: Join(3, 33, 60), 70: Join(12, 1023, 60)}
    talk.run(120, joins, leaves)
    talk.decoder.mailbox.close()
    return talk.verdict()._asdict() | {
        "tensor_cores": tensor_cores,
        "horizon_pages": horizon,
        "plans": talk.decoder.plans,
        "plan_layout_changes": len(changed),
    }


def machine() -> dict[str, Any]:
    import flashinfer
    import triton

    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return {
        "gpu": torch.cuda.get_device_name(), "cpu": names[0] if names else "", "cpus": len(names),
        "torch": torch.__version__, "triton": triton.__version__, "flashinfer": flashinfer.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--quick", action="store_true", help="checks and one case, few steps")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}

    def record(name: str, value: Any) -> None:
        results.setdefault(name, []).append(value)
        print(name, json.dumps(value), flush=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")

    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.cuda.stream(torch.cuda.Stream()):
        for cores, horizon in ((False, 1), (True, 1), (True, 16)):
            record("tokens", check_tokens(tensor_cores=cores, horizon=horizon))
        bench = Bench(QWEN3_06B, pages=PAGES if not options.quick else 2048)
        record("word", probes.tokens_follow_the_word(bench))
        record("staging", probes.staging_hazard(bench))
        steps = 48 if options.quick else 256
        for rows in (1, 32, 64, 256):
            record("bookkeeping", probes.bookkeeping(bench, rows, 768))
        record("bookkeeping", probes.bookkeeping(bench, 256, 4000, repeats=150))
        for rows in (1, 32, 64, 256):
            record("plan", probes.plan_cost(bench, rows, 640))
        record("plan", probes.plan_cost(bench, 256, 3872))
        for rows in (1, 32, 64, 256):
            for pinned in (False, True):
                record("host_alone", probes.host_alone(bench, rows, pinned=pinned))
        for attention in bench.decoders:
            for middle, count in ((768, steps), (4000, min(steps, 96))):
                for rows in (1, 32, 64, 256):
                    if options.quick and (rows, middle) != (32, 768):
                        continue
                    record("decode", bench.case(attention, rows, middle - count // 2, count))
            record("churn", bench.churn(attention, 64, 640, steps))


if __name__ == "__main__":
    main()
