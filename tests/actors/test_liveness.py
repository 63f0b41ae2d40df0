"""Death is seen when it begins, and children go with their parent."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from actors.liveness import LifeSigns, Watch, signal_name
from tests.actors.houses import alive
from tests.helpers import wait_until

SLEEPER = "import time; time.sleep(60)"
# A parent whose child binds its life to it, and says so once it has.
PARENT = """
import os, subprocess, sys
code = '''
import os, sys, time
from actors.liveness import die_with_parent
die_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", code, str(os.getpid())]).wait()
"""


def test_a_watch_tells_life_death_and_the_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEPER])
    watch = Watch(child.pid)
    assert watch.look() == LifeSigns(False, 0)
    child.send_signal(signal.SIGKILL)
    wait_until(lambda: watch.look().exiting)
    assert watch.look() == LifeSigns(True, signal.SIGKILL)
    child.wait()
    assert watch.look() == LifeSigns(True, 0)
    watch.close()


def test_an_ordinary_exit_shows_no_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    watch = Watch(child.pid)
    wait_until(lambda: watch.look().exiting)
    assert watch.look().signal == 0
    child.wait()
    watch.close()


@pytest.mark.behaviour("F-08")
def test_a_child_dies_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not alive(child)(), 2.0)
    parent.stdout.close()


def test_a_child_whose_parent_is_already_another_leaves_at_once() -> None:
    code = "from actors.liveness import die_with_parent; die_with_parent(1); print('still here')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGSEGV) == "SIGSEGV"
    assert signal_name(35) == "signal 35"
