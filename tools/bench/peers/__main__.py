"""`python -m tools.bench.peers`: start the peers, measure them in turns, print one table a dtype."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import msgspec

from mstar.model.files import resolve
from tools.bench.peers.arms import Arm, ArmFailed, LlamaServer, Mstar, Transformers, TransformersArm
from tools.bench.peers.compare import Case, Row, Run, rows, table, turns
from tools.bench.peers.gguf_file import fetch, widen

SINGLE = Case(1, "mstar", {"transformers generate": 1.3})
BATCH = Case(16, "mstar", {"transformers continuous": 3.0, "transformers static": 2.0})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="registry name or directory")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="each measures every arm twice: A B B A")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every arm")
    parser.add_argument("--arms", nargs="+", help="only those whose name contains one of these")
    parser.add_argument("--llama-server", type=Path, default=shutil.which("llama-server"), metavar="BINARY")
    parser.add_argument("--llama-port", type=int, default=18080)
    parser.add_argument("--gguf", type=Path, help="the model's GGUF; default: fetched from the registry")
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


def prompts(count: int, tokens: int, seed: str) -> list[list[int]]:
    """``count`` prompts of ``tokens`` ids that no other seed has, so that no cache helps anyone."""
    random = Random(seed)
    return [[random.randrange(1000, 30_000) for _ in range(tokens)] for _ in range(count)]


def measure(case: Case, arms: Sequence[Arm], options: argparse.Namespace) -> list[Run]:
    """A warm-up of each arm, then its turns."""
    count = 2 if case.concurrency == 1 else case.concurrency
    by_name = {arm.name: arm for arm in arms}
    for arm in arms:
        arm.run(prompts(count, options.prompt_tokens, "warm-up"), 8, case.concurrency)
    runs = []
    for turn, name in enumerate(turns(list(by_name), options.rounds)):
        asked = prompts(count, options.prompt_tokens, f"{case.concurrency} {turn // len(by_name)}")
        run = by_name[name].run(asked, options.new_tokens, case.concurrency)
        print(f"  {name}: {run.tokens / run.seconds:.1f} tok/s, load {run.load:.1f} {run.error}", flush=True)
        runs.append(run)
    return runs


def compare(dtype: str, options: argparse.Namespace, folder: Path) -> tuple[list[Row], str]:
    """All rows of ``dtype`` and their table."""
    files = resolve(options.model)
    window = options.prompt_tokens + options.new_tokens + 16
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        peer = Transformers(files.directory, dtype, folder, options.threads)
        stack.callback(peer.close)
        single: list[Arm] = [TransformersArm(peer, "generate")]
        batch: list[Arm] = [TransformersArm(peer, "continuous"), TransformersArm(peer, "static")]
        for name, start in (
            ("mstar", lambda: Mstar(options.model, dtype, 16, window, folder, options.threads)),
            ("llama.cpp", lambda: _llama(dtype, options, folder, window)),
        ):
            if not _wanted(name, options.arms):
                continue
            try:
                server = start()
            except (ArmFailed, OSError, KeyError, subprocess.CalledProcessError) as error:
                notes.append(f"{name} did not run: {error}")
                continue
            stack.callback(server.close)
            single.insert(0, server)
            batch.insert(0, server)
        found: list[Row] = []
        for case, arms in ((SINGLE, single), (BATCH, batch)):
            chosen = [arm for arm in arms if _wanted(arm.name, options.arms)]
            print(f"{dtype}, {case.concurrency} in flight", flush=True)
            runs = measure(case, chosen, options)
            found += rows(case, runs, peer.about["weight_bytes"])
        about = ", ".join(f"{key} {value}" for key, value in peer.about.items())
    head = (
        f"{dtype}, prompts of {options.prompt_tokens}, {options.new_tokens} new tokens, {options.threads} "
        f"thread(s), {platform.processor() or platform.machine()}, {os.cpu_count()} cores ({about})"
    )
    return found, "\n".join([head, "", table(found, peer.about["read_bytes_per_second"]), *notes, ""])


def _llama(dtype: str, options: argparse.Namespace, folder: Path, window: int) -> LlamaServer:
    if options.llama_server is None:
        raise ArmFailed("there is no llama-server on the path; name one with --llama-server")
    source = options.gguf or fetch(options.model, folder)
    wide = folder / f"model-{dtype}.gguf"
    widen(source, wide, dtype)
    name = f"llama.cpp {dtype}"
    return LlamaServer(options.llama_server, wide, name, 16, window, options.llama_port, options.threads)


def _wanted(name: str, only: Sequence[str] | None) -> bool:
    return not only or any(part in name or name in part for part in only)


def main() -> None:
    options = parse()
    everything, tables = {}, []
    for dtype in options.dtype:
        with tempfile.TemporaryDirectory(prefix="peers-") as folder:
            everything[dtype], text = compare(dtype, options, Path(folder))
        tables.append(text)
    print("\n" + "\n".join(tables))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(everything), indent=1))


if __name__ == "__main__":
    main()
