"""The leak guard sees what a test leaves behind and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from tests.helpers import leaks, wait_until

SLEEPER = "import time; time.sleep(60)"


def test_a_child_left_running_is_named_and_ended() -> None:
    before = leaks.trace()
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    found = leaks.leftovers(before, grace=0.0)
    assert [line.split(":")[0] for line in found] == [f"process {child.pid}"]
    child.wait()
    assert leaks.leftovers(before) == []


def test_a_grandchild_whose_parent_is_gone_is_found() -> None:
    before = leaks.trace()
    double = f"""if True:
        import subprocess, sys
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}], **quiet).pid)
    """
    ended = subprocess.run([sys.executable, "-c", double], capture_output=True, text=True, check=True)
    pid = int(ended.stdout)
    assert any(f"process {pid}:" in line for line in leaks.leftovers(before, grace=0.0))
    wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or leaks._read(pid, "cmdline") == b"")


def test_the_children_of_a_daemon_that_was_there_before_are_its_own() -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; input(); import subprocess; print(subprocess.run(['sleep', '60']))",
        ],
        stdin=subprocess.PIPE,
        text=True,
    )
    before = leaks.trace()
    assert parent.stdin is not None
    parent.stdin.write("\n")
    parent.stdin.close()
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    child = int(wait_until(children.read_text))
    assert leaks.leftovers(before, grace=0.0) == []
    os.kill(child, 9)
    parent.wait()


def test_a_name_in_shared_memory_is_found() -> None:
    before = leaks.trace()
    left = Path("/dev/shm") / f"leak-{uuid.uuid4().hex}"
    left.touch()
    assert f"shared memory {left}" in leaks.leftovers(before, grace=0.0)
    left.unlink()


def test_only_threads_that_outlive_the_interpreter_count() -> None:
    before = leaks.trace()
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, name=f"left-{d}", daemon=d) for d in (True, False)]
    for thread in threads:
        thread.start()
    assert leaks.leftovers(before, grace=0.0) == ["non-daemon thread 'left-False'"]
    end.set()
    for thread in threads:
        thread.join()
