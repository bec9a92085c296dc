"""The end of a process waits for the threads that deliver answers of a bucket: one that is inside would abort it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.command_process import MOST_SECONDS, environment

PROGRAM = """
import _thread
import atexit
import os
import holdfast.store.object_storage

is_ending, is_inside = _thread.allocate_lock(), _thread.allocate_lock()
is_ending.acquire()
is_inside.acquire()


def deliver() -> None:
    is_inside.release()
    is_ending.acquire()
    for _ in range(20_000):
        os.sched_yield()  # which leaves the interpreter, and enters it again
    os.write(1, b"it has left")


_thread.start_new_thread(deliver, ())
is_inside.acquire()
atexit.register(is_ending.release)  # the last one registered is the first one called
"""


@pytest.mark.process
def test_a_thread_that_delivers_an_answer_is_waited_for() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "it has left"), done.stderr
