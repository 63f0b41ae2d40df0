"""The peers: how each is started, asked for tokens, and ended."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import psutil

from tools.bench.peers.compare import Run
from tools.bench.serving.client import Client, Target
from tools.bench.serving.load import run_closed
from tools.bench.serving.workload import Job

__all__ = ["Arm", "ArmFailed", "LlamaServer", "Mstar", "Transformers", "TransformersArm"]

START_SECONDS = 300.0


class ArmFailed(Exception):
    """A peer did not start or stopped answering."""


class Arm(Protocol):
    """Something that generates tokens."""

    name: str

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int) -> Run:
        """Generate ``new_tokens`` greedily for each prompt, ``concurrency`` at once."""
        ...


class _Process:
    """A child and its CPU time; its output goes to a log file."""

    def __init__(self, command: Sequence[str], log: Path, threads: int, **pipes: Any) -> None:
        self.log = log
        self._log: IO[bytes] = log.open("wb")
        pipes.setdefault("stdout", self._log)
        self.process = subprocess.Popen(
            list(command), stderr=self._log, env=_environment(os.environ, threads), **pipes
        )

    def cpu_seconds(self) -> float:
        """CPU seconds so far of the child and of all that descend from it and still live."""
        total = 0.0
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def last_words(self) -> str:
        """The end of its log."""
        self._log.flush()
        return " ".join(self.log.read_text(errors="replace").split()[-60:])

    def close(self) -> None:
        """Ask it to end, then make it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class _Server:
    """An OpenAI-compatible server that was started here."""

    name: str

    def __init__(self, command: Sequence[str], target: Target, ready: str, log: Path, threads: int) -> None:
        self._process = _Process(command, log, threads)
        self._target = target
        try:
            asyncio.run(self._wait(ready))
        except BaseException:
            self._process.close()
            raise

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int) -> Run:
        return asyncio.run(self._run(prompts, new_tokens, concurrency))

    def close(self) -> None:
        self._process.close()

    async def _run(self, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int) -> Run:
        jobs = [Job("", len(prompt), new_tokens, ids=tuple(prompt)) for prompt in prompts]
        async with Client(self._target, clock=time.perf_counter) as client:
            cpu, begun = self._process.cpu_seconds(), time.perf_counter()
            exchanges = await run_closed(client, jobs, concurrency, time.perf_counter)
            seconds = time.perf_counter() - begun
            used = self._process.cpu_seconds() - cpu
        tokens = sum(exchange.output_tokens for exchange in exchanges)
        error = next((exchange.error for exchange in exchanges if exchange.error), "")
        if not error and tokens != new_tokens * len(prompts):
            error = f"{tokens} tokens came instead of {new_tokens * len(prompts)}"
        return Run(self.name, tokens, seconds, used, os.getloadavg()[0], error)

    async def _wait(self, path: str) -> None:
        async with Client(self._target, clock=time.perf_counter) as client:
            for _ in range(int(START_SECONDS * 5)):
                if self._process.process.poll() is not None:
                    raise ArmFailed(f"{self.name} ended while starting: {self._process.last_words()}")
                if await client.answers(path):
                    return
                await asyncio.sleep(0.2)
        raise ArmFailed(f"{self.name} was not ready in {START_SECONDS:.0f} s: {self._process.last_words()}")


class Mstar(_Server):
    """Our daemon, asked over its Unix socket."""

    name = "mstar"

    def __init__(self, model: str, dtype: str, slots: int, window: int, folder: Path, threads: int) -> None:
        socket = folder / "mstar.sock"
        command = [sys.executable, "-m", "mstar.cli.main", "serve", model, "--dtype", dtype, "--no-tcp"]
        command += ["--uds", str(socket), "--max-num-seqs", str(slots), "--max-model-len", str(window)]
        command += ["--threads", str(threads)]
        target = Target("http://localhost", model, uds=str(socket))
        super().__init__(command, target, "/ready", folder / "mstar.log", threads)


class LlamaServer(_Server):
    """llama.cpp's server with one slot a sequence."""

    def __init__(
        self, binary: Path, gguf: Path, name: str, slots: int, window: int, port: int, threads: int
    ) -> None:
        self.name = name
        command = [str(binary), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(threads), "--threads-batch", str(threads), "--parallel", str(slots)]
        command += ["--ctx-size", str(slots * window), "--cache-ram", "0"]
        target = Target(
            f"http://127.0.0.1:{port}", "default", keep_alive=False, extra={"cache_prompt": False}
        )
        super().__init__(command, target, "/health", gguf.with_suffix(".log"), threads)


class Transformers:
    """One process with transformers' model, asked by lines of JSON; see transformers_worker."""

    def __init__(self, directory: Path, dtype: str, folder: Path, threads: int) -> None:
        command = [sys.executable, "-m", "tools.bench.peers.transformers_worker", str(directory), dtype]
        self._process = _Process(
            command,
            folder / "transformers.log",
            threads,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.about = self.ask({"mode": "about"})

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The worker's answer; raises ArmFailed when it has died."""
        child = self._process.process
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(question) + b"\n")
        child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise ArmFailed(f"transformers ended: {self._process.last_words()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.close()


class TransformersArm:
    """One way of transformers to generate: "generate" (one by one), "static" (one batch) or "continuous"."""

    def __init__(self, owner: Transformers, mode: str) -> None:
        self.name = f"transformers {mode}"
        self._owner = owner
        self._mode = mode

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int) -> Run:
        answer = self._owner.ask(
            {
                "mode": self._mode,
                "prompts": [list(prompt) for prompt in prompts],
                "new_tokens": new_tokens,
                "concurrency": concurrency,
            }
        )
        if "error" in answer:
            return Run(self.name, error=str(answer["error"]))
        tokens, seconds, cpu = answer["tokens"], answer["seconds"], answer["cpu_seconds"]
        return Run(self.name, tokens, seconds, cpu, os.getloadavg()[0])


def _environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    return {**base, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
