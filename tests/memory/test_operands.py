"""What is recorded of an operator's operands and results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from medckpt.memory.operands import as_cpu_keeps, moved_bytes
from medckpt.memory.step import Step
from medckpt.memory.trace import trace_step

aten = torch.ops.aten


def test_bytes_moved_count_a_given_result_as_written_once():
    a, b = torch.ones(8), torch.ones(8)
    result = aten.add.Tensor(a, b)
    assert moved_bytes(aten.add.Tensor, [a, b], [result]) == 3 * 32
    assert moved_bytes(aten.add_.Tensor, [a, b], [a]) == 3 * 32, "in place: read and written"
    assert moved_bytes(aten.add.out, [a, b, result], [result]) == 3 * 32
    assert moved_bytes(aten.gelu_backward.grad_input, [a, b, a], [a]) == 3 * 32, "in the place of an argument"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["none", "float32", "same"])
@pytest.mark.parametrize("norm", ["layer", "group", "batch", "batch, running"])
def test_a_norm_keeps_statistics_as_a_real_cpu_does(norm: str, weights: str, dtype: torch.dtype):
    x = torch.randn(2, 8, 4, 4, 4, dtype=dtype)
    features = 4 if norm == "layer" else 8
    gain = None if weights == "none" else torch.ones(features, dtype=dtype if weights == "same" else torch.float32)
    running = torch.ones(8) if norm == "batch, running" and weights != "same" else None
    func, args = {
        "layer": (aten.native_layer_norm.default, (x, [4], gain, gain, 1e-5)),
        "group": (aten.native_group_norm.default, (x, gain, gain, 2, 8, 64, 2, 1e-5)),
        "batch": (aten.native_batch_norm.default, (x, gain, gain, None, None, True, 0.1, 1e-5)),
        "batch, running": (aten.native_batch_norm.default, (x, gain, gain, running, running, True, 0.1, 1e-5)),
    }[norm]
    real: Any = func(*args)
    with FakeTensorMode() as mode:
        args = tree_map_only(Tensor, mode.from_tensor, args)
        fake = as_cpu_keeps(func, args, func(*args))
    assert [(t.dtype, t.shape) for t in fake] == [(t.dtype, t.shape) for t in real]


@pytest.mark.parametrize(("rules", "kept"), [("cpu", 2), ("cuda", 0)])
def test_a_recomputed_region_keeps_the_state_of_the_generator_in_the_memory_of_the_host(rules: Any, kept: int):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    graph = trace_step(net, torch.randn(2, 8), Step(precision="32", rules=rules), recompute=["0", "1"])
    states = [s for s in graph.storages if s.nbytes == torch.get_rng_state().numel()]
    assert len(states) == kept
    assert all(graph.ops[s.born].phase == "forward" and graph.ops[s.died or 0].phase == "backward" for s in states)
