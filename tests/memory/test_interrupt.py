"""Ctrl-C in the middle of a trace: it arrives, at once, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medckpt.memory.interrupt import interrupts_held
from medckpt.memory.step import Step
from tests.memory.test_trace import of

ENDLESS = """
import signal
import torch
from torch import nn
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

layers = [nn.Sequential(nn.Conv1d(4, 4, 3), nn.InstanceNorm1d(4), nn.ReLU(), nn.Dropout(0.1)) for _ in range(6)]
net, x = nn.Sequential(*layers), torch.empty(2, 4, 64)
trace_step(net, x, Step())
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C, and hand that on
for _ in range(3):
    print("ready", flush=True)
    try:
        while True:
            trace_step(net, x, Step(), recompute=("1", "2"))
    except KeyboardInterrupt:
        pass
print("ready", flush=True)
while True:
    trace_step(net, x, Step(), recompute=("1", "2"))
"""


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    """Python's own handler: where the tests run in a shell's background, Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_process_is_interrupted_again_and_again_and_ends_by_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for delay in (0.05, 0.2, 0.35, 0.5):
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, error
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert "ignored" not in error


class Interrupted(nn.Module):
    """Sends itself Ctrl-C in forward, or when the gradient passes; and may swallow what comes of it."""

    def __init__(self, phase: str, swallow: bool = False) -> None:
        super().__init__()
        self.layer, self.phase, self.swallow = nn.Linear(8, 8), phase, swallow
        self.after = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if self.phase == "backward":
            x.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGINT))
            return x.exp()
        os.kill(os.getpid(), signal.SIGINT)
        try:
            return x.exp()
        except KeyboardInterrupt:
            if not self.swallow:
                raise
        return x.sin()


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """Signals that a handler got, which raises nothing."""
    got: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("net", [Interrupted("forward"), Interrupted("backward"), Interrupted("forward", swallow=True)])
def test_it_is_answered_in_forward_and_backward_even_if_the_model_swallows_it(net: nn.Module, rules: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        of(net, torch.ones(5, 8), Step(rules=rules))
    assert signal.getsignal(signal.SIGINT) is before
    assert of(nn.Linear(8, 8), torch.ones(5, 8), Step(rules=rules)).ops, "the next one runs"


def test_a_handler_of_the_callers_is_called_once_and_the_trace_goes_on(handled: list[int]) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert of(Interrupted("forward"), torch.ones(5, 8)).ops
    assert handled == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is before


def turned_into_another() -> None:
    with interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        raise RuntimeError("made of it in C++")


def test_what_was_not_answered_inside_is_answered_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        turned_into_another()
    assert isinstance(caught.value.__context__, RuntimeError)


def test_a_second_one_is_answered_at_once() -> None:
    reached = []

    def twice() -> None:
        with interrupts_held():
            for number in (1, 2):
                os.kill(os.getpid(), signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [1]


def test_other_threads_and_ignored_signals_are_left_alone() -> None:
    found: list[Any] = []
    before = signal.getsignal(signal.SIGINT)

    def elsewhere() -> None:
        with interrupts_held():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
