"""Work in processes that may die or hang: each loss costs its own item, never the rest.

`ProcessPoolExecutor` gives up all work when one process dies, and cannot end one that hangs. Decoders of damaged files
do both. A script that comes here needs the `if __name__ == "__main__"` guard, as always with spawned processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, TypeVar

from medckpt.errors import MedckptError

T = TypeVar("T")
R = TypeVar("R")

_READY = "ready"
_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Stands for the result of an item whose process did not survive it."""

    why: str


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: connection.Connection
    item: int | None = None
    since: float = 0.0
    started: bool = False


def run_each(
    function: Callable[[T], R], items: Sequence[T], *, workers: int, limit_seconds: float
) -> Iterator[tuple[int, R | Lost]]:
    """Yields (index, result) for every item as they are done, from at most `workers` processes.

    An item whose process dies, or that takes longer than `limit_seconds`, yields `Lost`; it is not tried again.

    Args:
        function: of a module's top level, as are `items` and results: they travel by pickle.

    Raises:
        MedckptError: the processes cannot start.
    """
    left = list(reversed(range(len(items))))
    team: list[_Worker] = []
    try:
        while left or any(worker.item is not None for worker in team):
            while left and len(team) < min(workers, len(left) + sum(w.item is not None for w in team)):
                team.append(_start(function))
            ready = connection.wait([worker.pipe for worker in team], timeout=_POLL_SECONDS)
            for worker in list(team):
                if worker.pipe in ready:
                    yield from _hear(worker, team, left, items)
                elif worker.item is not None and time.monotonic() - worker.since > limit_seconds:
                    yield _lose(worker, team, f"not done after {limit_seconds:g} s")
    finally:
        for worker in team:
            worker.process.kill()
        for worker in team:
            worker.process.join()


def _hear(worker: _Worker, team: list[_Worker], left: list[int], items: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    try:
        message = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        if not worker.started:
            raise MedckptError(
                "the processes of the check do not start (a script needs `if __name__ == '__main__':` around the "
                "call; check with workers=0 to stay in this process)."
            ) from None
        if worker.item is None:
            team.remove(worker)
        else:
            yield _lose(worker, team, _death(worker.process.exitcode))
        return
    worker.started = True
    if message != _READY:
        yield message
    worker.item = left.pop() if left else None
    worker.since = time.monotonic()
    if worker.item is None:
        team.remove(worker)
        _send(worker, None)
        worker.process.join(1)
    else:
        _send(worker, (worker.item, items[worker.item]))


def _send(worker: _Worker, message: object) -> None:
    with contextlib.suppress(OSError):  # it has died: its end of the pipe says so in a moment
        worker.pipe.send(message)


def _lose(worker: _Worker, team: list[_Worker], why: str) -> tuple[int, Lost]:
    team.remove(worker)
    worker.process.kill()
    worker.process.join()
    assert worker.item is not None
    return worker.item, Lost(why=why)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        more = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{more}"
    return f"its process ended with exit code {code}"


def _start(function: Callable[[Any], Any]) -> _Worker:
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, function), daemon=True)
    with _no_interrupt():
        process.start()
    there.close()  # else its death would not close the pipe
    return _Worker(process=process, pipe=here)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Holds Ctrl-C back: what is started inside never hears it, and this process hears it at the end."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: connection.Connection, function: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    # Libraries complain of damaged bytes in words of their own, file by file; what counts comes back in the results.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    pipe.send(_READY)
    while True:
        try:
            message = pipe.recv()
        except EOFError:  # the parent is gone
            return
        if message is None:
            return
        index, item = message
        pipe.send((index, function(item)))
