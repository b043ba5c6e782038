"""Work in processes that die or hang: one item is lost, the rest is done."""

from __future__ import annotations

import os
import signal
import time

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
