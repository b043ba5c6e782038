"""The values that a step's record is made of, by hand."""

from __future__ import annotations

import pytest
import torch

from medckpt.memory.graph import Op, StepGraph, Storage, TensorSpec, contiguous_stride

aten = torch.ops.aten


def spec(*shape: int, dtype: torch.dtype = torch.float32, stride: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec(shape, stride or contiguous_stride(shape), dtype)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (1, 7), (4, 0, 3), (2, 1, 1, 6)])
def test_dense_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@pytest.mark.parametrize(
    ("tensor", "nbytes", "text"),
    [
        (spec(2, 3), 24, "float32[2x3]"),
        (spec(2, 3, dtype=torch.bfloat16), 12, "bfloat16[2x3]"),
        (spec(4, dtype=torch.int64), 32, "int64[4]"),
        (spec(), 4, "float32[]"),
        (spec(0, 3), 0, "float32[0x3]"),
        (spec(2, 3, stride=(1, 2)), 24, "float32[2x3]@1x2"),
        (spec(5, 3, stride=(0, 1)), 60, "float32[5x3]@0x1"),
    ],
)
def test_a_tensor_in_bytes_and_words(tensor: TensorSpec, nbytes: int, text: str) -> None:
    assert tensor.nbytes == nbytes
    assert str(tensor) == text


def op(call: object, name: str = "add.Tensor") -> Op:
    return Op(name=name, region="", phase="forward", call=call, flops=0, bytes_moved=0)  # type: ignore[arg-type]


def test_signature_is_equal_for_equal_work_only() -> None:
    first = op((aten.add.Tensor, (spec(2, 3), spec(3)), {"alpha": 2}))
    assert first.signature() == "add.Tensor(float32[2x3], float32[3], alpha=2)"
    same = op((aten.add.Tensor, (spec(2, 3), spec(3)), {"alpha": 2}))
    assert same.signature() == first.signature()
    others = [
        (aten.add.Tensor, (spec(2, 3), spec(3)), {"alpha": 3}),
        (aten.add.Tensor, (spec(2, 3, dtype=torch.bfloat16), spec(3)), {"alpha": 2}),
        (aten.add.Tensor, (spec(2, 3, stride=(1, 2)), spec(3)), {"alpha": 2}),
        (aten.add.Tensor, (spec(2, 4), spec(4)), {"alpha": 2}),
    ]
    assert len({first.signature(), *(op(other).signature() for other in others)}) == 5
    assert op(None, "view.default").signature() == "view.default"


def test_tensor_arguments_are_found_in_lists_and_keywords() -> None:
    listed = op((aten.cat.default, ((spec(2), spec(3)), 0), {"out": spec(5)}))
    assert [tensor.shape for tensor in listed.specs()] == [(2,), (3,), (5,)]
    assert op(None).specs() == []


def test_it_computes_in_its_first_floating_type() -> None:
    gather = op((aten.embedding.default, (spec(4, dtype=torch.int64), spec(9, 2, dtype=torch.float16)), {}))
    assert gather.dtype == torch.float16
    assert op((aten.add.Tensor, (spec(4, dtype=torch.int64),), {})).dtype == torch.float32
    assert op(None).dtype == torch.float32


def test_saved_is_what_forward_makes_and_backward_still_has() -> None:
    phases = ("forward", "loss", "backward", "optimizer")
    ops = [Op(name="x", region="", phase=p, call=None, flops=0, bytes_moved=0) for p in phases]  # type: ignore[arg-type]
    graph = StepGraph(ops=ops)

    def saved(born: int, died: int | None, phase: str) -> bool:
        return graph.saved_for_backward(Storage(1, "activations", born, "", phase, died))  # type: ignore[arg-type]

    assert saved(0, 2, "forward")
    assert saved(1, None, "loss")
    assert not saved(0, 1, "forward"), "freed before the backward pass"
    assert not saved(2, 3, "backward"), "not made by forward"
    assert not graph.saved_for_backward(Storage(1, "parameters", -1))
