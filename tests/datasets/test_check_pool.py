"""Work in processes that die or hang: one item is lost, the rest is done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from medckpt.datasets.check import pool
from medckpt.datasets.check.pool import Lost, run_each


def work(item: str) -> str:
    if item == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "leave":
        os._exit(3)
    if item == "hang":
        time.sleep(60)
    return item.upper()


def test_one_item_is_lost_and_the_rest_is_done() -> None:
    items = ["a", "die", "b", "hang", "leave", "c", "d"]
    began = time.monotonic()
    found = dict(run_each(work, items, workers=2, limit_seconds=2))
    assert time.monotonic() - began < 50
    assert [found[i] for i in (0, 2, 5, 6)] == ["A", "B", "C", "D"]
    assert found[1] == Lost(why="its process was ended by SIGKILL, as the system does when memory runs out")
    assert found[3] == Lost(why="not done after 2 s")
    assert found[4] == Lost(why="its process ended with exit code 3")


def test_no_items() -> None:
    assert list(run_each(work, [], workers=2, limit_seconds=1)) == []


def test_processes_that_start_do_not_hear_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    true_start = pool._start

    def start(function: Callable[[int], int]) -> pool._Worker:
        worker = true_start(function)
        for _ in range(20):
            os.kill(worker.process.pid, signal.SIGINT)
            time.sleep(0.02)
        return worker

    monkeypatch.setattr(pool, "_start", start)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        assert list(run_each(abs, [-1, -2], workers=1, limit_seconds=60)) == [(0, 1), (1, 2)]
    finally:
        signal.signal(signal.SIGINT, before)
