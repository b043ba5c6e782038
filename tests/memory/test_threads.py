"""A forecast beside other work of the same process: neither changes the other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from medckpt.forecasting import forecast
from medckpt.memory.step import Step
from tests.memory.test_autocast import Operators
from tests.memory.test_trace import of


def trained(enabled: bool, steps: int = 6) -> list[torch.Tensor]:
    """Returns the weights after some real steps with a dropout of their own, under CPU autocast or not."""
    torch.manual_seed(7)
    net, x = Operators(), torch.randn(2, 4, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.parametrize("enabled", [True, False], ids=["bf16", "32"])
def test_a_thread_that_trains_gets_what_it_gets_alone(enabled: bool) -> None:
    alone = trained(enabled)
    found: list[Any] = []

    def train() -> None:
        try:
            found.extend(trained(enabled) for _ in range(2))
        except BaseException as error:
            found.append(error)

    net = nn.Sequential(nn.Conv1d(4, 4, 3), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1)), nn.LayerNorm(14))
    thread = threading.Thread(target=train)
    thread.start()
    # With casts of its own in autocast's cache, which is the process's, a step empties it for the other thread too.
    steps = [Step(rules=rules, weight_cache=False) for rules in ("cuda", "cpu")]
    graphs: list[Any] = []
    while thread.is_alive() or not graphs:
        graphs += [of(net, torch.empty(2, 4, 16), step, recompute=("1",)) for step in steps]
    thread.join()
    assert len(found) == 2, found
    for weights in found:
        assert not isinstance(weights, BaseException), weights
        assert all(map(torch.equal, weights, alone))
    quiet = [of(net, torch.empty(2, 4, 16), step, recompute=("1",)) for step in steps]
    assert graphs == quiet * (len(graphs) // 2), "and the forecasts are those of a quiet process"


@pytest.mark.parametrize("rules", ["cpu", "cuda"])
@pytest.mark.parametrize("recompute", [(), ("1",)], ids=["none", "recompute"])
def test_a_forecast_leaves_the_casts_of_another_thread_alone(rules: Any, recompute: tuple[str, ...]) -> None:
    net, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)
    cast, traced = threading.Event(), threading.Event()
    found: list[bool] = []

    def train() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            first = net(x)
            cast.set()
            traced.wait()
            second = net(x)
        turned = [node for out in (first, second) for node, _ in out.grad_fn.next_functions if node is not None]
        casts = [node.next_functions[0][0] for node in turned]
        found.append(len(casts) == 2 and casts[0] is casts[1])

    thread = threading.Thread(target=train)
    thread.start()
    cast.wait()
    step = Step(rules=rules, precision="bf16-mixed", weight_cache=False)
    of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.empty(2, 4), step, recompute=recompute)
    traced.set()
    thread.join()
    assert found == [True], "the weight was cast twice"


@pytest.mark.parametrize("memory", ["cpu", "a100_40gb"])
def test_two_forecasts_at_once_are_those_of_one(memory: str) -> None:
    net = nn.Sequential(nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4), nn.Softmax(1), nn.Conv3d(4, 2, 3))
    jobs = [(8, "32"), (10, "bf16-mixed")]

    def peak(side: int, precision: Any) -> int:
        return forecast(net, torch.empty(2, 1, side, side, side), precision=precision, memory=memory).peak_bytes

    alone = [peak(*job) for job in jobs]
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        try:
            found[number] = peak(*jobs[number])
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(jobs))] == alone
