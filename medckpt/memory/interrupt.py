"""Ctrl-C while a step is traced.

A trace runs Python from within C++ (dispatch modes, autograd) and from weak references' callbacks. An exception that
Python's signal handler raises there is lost, or ends the process. So it is raised where it can be answered.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Holds SIGINT back, and yields what answers it: called at a safe place, it runs the handler that was there.

    As a rule that one raises KeyboardInterrupt. What was not answered inside is answered at the end; a second SIGINT
    is answered at once. In other threads than the main one, and where the signal is ignored or left to the system,
    nothing is changed.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: None
        return
    held = _Held(handler)
    try:
        signal.signal(signal.SIGINT, held.receive)
        yield held.answer
    except BaseException as error:
        held.give_back()
        if not isinstance(error, held.raised):  # something else went wrong, or turned it into something else
            held.answer()
        raise
    held.give_back()
    held.answer()


class _Held:
    """A handler of SIGINT that waits for its moment."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.raised: tuple[type[BaseException], ...] = ()
        """What the handler has raised."""
        self._received = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        again, self._received = self._received, True
        if again:
            self.answer()

    def answer(self) -> None:
        if self._received:
            try:
                self.handler(signal.SIGINT, sys._getframe())
            except BaseException as error:
                # It stays received: a model that swallows the exception gets it again at its next operator.
                self.raised = (type(error),)
                raise
            self._received = False

    def give_back(self) -> None:
        signal.signal(signal.SIGINT, self.handler)
