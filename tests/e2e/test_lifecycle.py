"""Starting, draining and stopping a real server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mstar import Engine
from mstar.client.errors import ClientError, EngineFailed, NotReady
from mstar.client.types import Chunk
from mstar.config.load import ConfigError
from tests.e2e.server import PATIENCE, Server, environment, gone, mstar, shared_memory_of
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


class Streams:
    """Streams in flight, each read by a thread; `ends` tells how each ended."""

    def __init__(self, server: Server, count: int, tokens: int) -> None:
        self.client = server.client()
        self.pool = ThreadPoolExecutor(count)
        self.begun = [threading.Event() for _ in range(count)]
        self.futures = [self.pool.submit(self._read, event, tokens) for event in self.begun]
        for event in self.begun:
            assert event.wait(PATIENCE)

    def _read(self, begun: threading.Event, tokens: int) -> Chunk | ClientError:
        last = Chunk(choice=0)
        try:
            for chunk in self.client.generate("the", max_tokens=tokens, ignore_eos=True, stream=True):
                begun.set()
                last = chunk
        except ClientError as error:
            return error
        return last

    def ends(self) -> list[Chunk | ClientError]:
        found = [future.result(PATIENCE) for future in self.futures]
        self.pool.shutdown()
        self.client.close()
        return found


@pytest.mark.behaviour("F-31", "B-15")
def test_sigterm_lets_streams_finish_refuses_new_work_and_exits_with_0(model: Path, folder: Path) -> None:
    with Server(model, folder, "--drain-seconds", 60) as server, server.client() as client:
        streams, tree = Streams(server, 3, 600), server.tree()
        server.send(signal.SIGTERM)
        wait_until(lambda: not client.ready(), what="ready to say no")
        with pytest.raises(NotReady):
            client.generate("the")
        ends = streams.ends()
        assert [end.usage.completion_tokens for end in ends if isinstance(end, Chunk) and end.usage] == [
            600
        ] * 3
        assert server.wait() == 0
        gone(tree)
    assert sorted(path.name for path in folder.iterdir()) == ["server.log"]
    assert shared_memory_of([server.pid]) == []


@pytest.mark.behaviour("F-31")
def test_after_the_drain_time_the_rest_ends_with_one_error_event(model: Path, folder: Path) -> None:
    with Server(model, folder, "--drain-seconds", 0.2) as server:
        streams = Streams(server, 3, 8000)
        server.send(signal.SIGTERM)
        assert [type(end) for end in streams.ends()] == [NotReady] * 3
        assert server.wait() == 0


@pytest.mark.behaviour("F-31")
def test_a_second_signal_hastens_and_streams_still_end_with_an_error_event(model: Path, folder: Path) -> None:
    with Server(model, folder, "--drain-seconds", 300) as server:
        streams = Streams(server, 3, 8000)
        server.send(signal.SIGTERM)
        with server.client() as client:
            wait_until(lambda: not client.ready())
        server.send(signal.SIGTERM)
        assert [type(end) for end in streams.ends()] == [NotReady] * 3
        assert server.wait() == 0


def test_ctrl_c_reaches_the_whole_group_and_still_drains(model: Path, folder: Path) -> None:
    with Server(model, folder) as server:
        streams = Streams(server, 1, 500)
        for process in server.tree():
            process.send_signal(signal.SIGINT)
        (end,) = streams.ends()
        assert isinstance(end, Chunk)
        assert server.wait() == 0


def test_a_stop_during_the_start_ends_it_and_leaves_nothing(model: Path, folder: Path) -> None:
    with Server(model, folder, wait=False) as server:
        wait_until(lambda: len(server.tree()) > 1, 30, excuse=(psutil.NoSuchProcess,))
        tree = server.tree()
        server.send(signal.SIGTERM)
        assert server.wait() == 0
        gone(tree)
    assert sorted(path.name for path in folder.iterdir()) == ["server.log"]


@pytest.mark.behaviour("F-09")
def test_two_servers_share_nothing_and_a_third_is_told_whose_port_and_socket_it_wants(
    model: Path, folder: Path
) -> None:
    other = folder / "other"
    other.mkdir()
    with Server(model, folder) as first, Server(model, other) as second:
        for server in (first, second):
            with server.client() as client:
                assert client.generate("the", max_tokens=1).usage.completion_tokens == 1
        port = first.url.rpartition(":")[2]
        refused = mstar("serve", model, "--port", port, "--uds", folder / "third.sock")
        assert refused.returncode == 1
        assert f"port {port} of 127.0.0.1 is in use by process {first.pid}" in refused.stderr.splitlines()[-1]
        refused = mstar("serve", model, "--port", 0, "--uds", second.socket, "--daemon")
        assert refused.returncode == 1
        assert f"{second.socket} is in use by process {second.pid}" in refused.stderr.splitlines()[-1]
    assert not (folder / "third.sock").exists()


@pytest.mark.behaviour("F-10")
def test_every_stage_of_a_start_is_logged_with_its_time(model: Path, folder: Path) -> None:
    with Server(model, folder) as server:
        lines = server.log.read_text().splitlines()
    for stage in (
        "daemon binding",
        "daemon finding the model",
        "rank/0 loading weights",
        "gateway/0 tokenizer",
    ):
        assert any(f"INFO {stage}" in line and "seconds=" in line for line in lines), stage
    assert any("INFO daemon ready model=tiny" in line for line in lines)


@pytest.mark.behaviour("F-10")
def test_a_failed_load_ends_with_the_cause_its_actor_and_stage(model: Path, folder: Path) -> None:
    broken = folder / "broken"
    shutil.copytree(model, broken)
    os.truncate(broken / "model.safetensors", 1000)
    failed = mstar("serve", broken, "--port", 0, "--uds", folder / "s")
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert "the start failed: actor rank/0" in last
    assert 'in stage "loading weights"' in last
    assert "model.safetensors cannot be read" in last
    assert "Traceback" not in failed.stderr


@pytest.mark.behaviour("F-10")
def test_a_child_killed_during_the_start_is_named_with_its_signal(model: Path, folder: Path) -> None:
    with Server(model, folder, wait=False) as server:

        def rank() -> psutil.Process | None:
            lines = [
                line.split() for line in server.log.read_text().splitlines() if "rank/0 starting" in line
            ]
            return server.tree()[1] if lines else None

        victim = wait_until(rank, 30, excuse=(psutil.NoSuchProcess,))
        assert victim is not None
        victim.kill()
        assert server.wait() == 1
    last = server.log.read_text().splitlines()[-1]
    assert "the start failed: actor rank/0" in last
    assert "killed by SIGKILL" in last


@pytest.mark.behaviour("F-11")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small /dev/shm needs root")
def test_a_small_shared_memory_is_one_sentence_that_names_size_and_flag(model: Path, folder: Path) -> None:
    script = f"mount -t tmpfs -o size=1m tmpfs /dev/shm && exec {sys.executable} -m mstar.cli.main " + (
        f"serve {model} --port 0 --uds {folder / 's'}"
    )
    failed = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, env=environment(), check=False
    )
    if "unshare" in failed.stderr or "mount:" in failed.stderr:
        pytest.skip(f"no private /dev/shm here: {failed.stderr.strip()}")
    assert failed.returncode == 1
    last = failed.stderr.splitlines()[-1]
    assert "--shm-size" in last
    assert "Traceback" not in failed.stderr


@pytest.mark.behaviour("F-13")
def test_an_idle_server_uses_under_one_per_cent_of_a_core(model: Path, folder: Path) -> None:
    def used(process: psutil.Process) -> float:
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        return sum(int((t / "schedstat").read_text().split()[0]) for t in threads) / 1e9

    with Server(model, folder) as server, server.client() as client:
        client.generate("the", max_tokens=3)
        tree = server.tree()
        shares: list[float] = []

        def idle() -> bool:
            start = [used(process) for process in tree]
            threading.Event().wait(1.0)
            shares.append(sum(used(process) for process in tree) - sum(start))
            return shares[-1] < 0.01

        wait_until(idle, 15, what=f"a second with under 10 ms of CPU time, not {shares}")


def test_background_start_returns_when_ready_and_stop_waits_until_it_is_gone(
    model: Path, folder: Path
) -> None:
    started = mstar("serve", model, "--port", 0, "--uds", folder / "s", "--daemon")
    assert started.returncode == 0, started.stderr
    assert "Serving tiny" in started.stdout
    status = mstar("status", "--uds", folder / "s")
    assert status.returncode == 0
    assert "tiny: ready" in status.stdout
    pid = int(next(line.split()[1] for line in status.stdout.splitlines() if line.split()[:1] == ["pid"]))
    assert os.getsid(pid) == pid
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    stopped = mstar("stop", "--uds", folder / "s")
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped process {pid}\n")
    gone(tree)
    assert mstar("stop", "--uds", folder / "s").returncode == 1
    assert sorted(path.name for path in folder.iterdir()) == ["s.log"]


def test_the_commands_talk_to_the_server(model: Path, folder: Path) -> None:
    with Server(model, folder) as server:
        at = ("--uds", server.socket, "--max-tokens", 6, "--temperature", 0)
        once = mstar("chat", "--once", "hello", *at)
        assert (once.returncode, once.stderr) == (0, "")
        assert once.stdout.strip()
        whole = mstar("generate", "the", "--json", *at)
        assert (
            '"completion_tokens":6' in whole.stdout.replace(" ", "")
            or '"finish_reason":"stop"' in whole.stdout
        )
        over_http = mstar("generate", "the", "--url", server.url, *at[2:])
        over_native = mstar("generate", "the", *at)
        assert over_http.stdout == over_native.stdout
        wrong = mstar("generate", "the", *at[:2], "--temperature", 9)
        assert wrong.returncode == 1
        assert wrong.stderr.startswith("mstar generate: ")
        assert "temperature" in wrong.stderr
        assert "Traceback" not in wrong.stderr
        talk = subprocess.run(
            [
                sys.executable,
                "-m",
                "mstar.cli.main",
                "chat",
                "--uds",
                str(server.socket),
                "--max-tokens",
                "3",
            ],
            input="hello\n/clear\nagain\n",
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert talk.returncode == 0
        assert talk.stderr == ""


def test_an_engine_serves_its_script_and_is_gone_with_it(model: Path) -> None:
    with Engine(str(model), max_num_seqs=2, max_model_len=64) as engine:
        tree = [psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
        assert engine.generate("the", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2
        listening = [
            c
            for p in tree
            for c in p.net_connections()
            if c.status == "LISTEN" and c.family.name != "AF_UNIX"
        ]
        assert listening == []
    gone(tree)


SCRIPT = """
import sys, time
from mstar import Engine
engine = Engine(sys.argv[1])
print(engine.pid, flush=True)
time.sleep(100)
"""


def test_an_engine_dies_with_a_script_that_is_killed(model: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model)], stdout=subprocess.PIPE, env=environment()
    ) as script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        script.kill()
        gone(tree)


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="There is no model"):
        Engine(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        Engine(max_num_seqs=0)
    with pytest.raises(ConfigError, match="private socket"):
        Engine(port=8000)
