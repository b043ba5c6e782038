"""What is recorded of an operator's operands."""

from __future__ import annotations

import torch

from medckpt.memory.operands import moved_bytes


def test_bytes_moved_count_a_given_result_as_written_once():
    aten = torch.ops.aten
    a, b = torch.ones(8), torch.ones(8)
    result = aten.add.Tensor(a, b)
    assert moved_bytes(aten.add.Tensor, [a, b], [result]) == 3 * 32
    assert moved_bytes(aten.add_.Tensor, [a, b], [a]) == 3 * 32, "in place: read and written"
    assert moved_bytes(aten.add.out, [a, b, result], [result]) == 3 * 32
    assert moved_bytes(aten.gelu_backward.grad_input, [a, b, a], [a]) == 3 * 32, "in the place of an argument"
