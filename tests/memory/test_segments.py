"""A step cut into segments: who makes, reads, holds and frees what, on a step written by hand."""

from __future__ import annotations

from typing import Any

import torch

from medckpt.memory.graph import Op, Phase, StepGraph, Storage, TensorSpec
from medckpt.memory.profile import MemoryProfile
from medckpt.memory.segments import Cut, cuts

CPU = MemoryProfile(name="cpu", device="cpu", bandwidth_gb_s=1.0, fp32_tflops=1.0, bandwidth_share=1.0, launch_us=1e-9)


def step(ops: list[tuple[str, Phase, tuple[int, ...]]], storages: list[tuple[int, int, int | None, Any]]) -> StepGraph:
    """Returns a step of (region, phase, storages that are read) and (bytes, born, died, kind)."""
    graph = StepGraph(rules="cpu")
    call = (torch.ops.aten.relu.default, (TensorSpec((1,), (1,), torch.float32),), {})
    for region, phase, reads in ops:
        graph.ops.append(Op("relu.default", region, phase, call, 0, 10**6, reads))
    for index, (nbytes, born, died, kind) in enumerate(storages):
        graph.storages.append(Storage(nbytes, kind, born, died=died))
        graph.events += [(born, index, 1)] if born >= 0 else []
        graph.events += [(died, index, -1)] if died is not None else []
    graph.events.sort(key=lambda event: (event[0], -event[2]))
    return graph


def plain() -> StepGraph:
    """a -> b -> loss; a's inner tensor (1) is for itself, its output (2) is read by b, in backward too."""
    return step(
        [
            ("a.conv", "forward", (0,)),
            ("a.act", "forward", (1,)),
            ("b", "forward", (2,)),
            ("", "loss", (3,)),
            ("", "backward", (4,)),
            ("b", "backward", (2, 5)),
            ("a.act", "backward", (1, 6)),
            ("", "optimizer", ()),
        ],
        [
            (7, -1, None, "inputs"),
            (100, 0, 6, "activations"),
            (200, 1, 5, "activations"),
            (300, 2, 3, "activations"),
            (40, 3, 4, "activations"),
            (50, 4, 5, "activations"),
            (60, 5, 6, "activations"),
            (90, 6, None, "gradients"),
        ],
    )


def recomputed() -> StepGraph:
    """The same with b recomputed: it holds its input until its recompute is over; its own output is made anew."""
    graph = plain()
    graph.ops.insert(5, Op("relu.default", "b", "recompute", graph.ops[0].call, 0, 10**6, (2,)))
    shift = {index: index + (index >= 5) for index in range(9)}
    for storage in graph.storages:
        storage.born = storage.born if storage.born < 0 else shift[storage.born]
        storage.died = None if storage.died is None else shift[storage.died]
    graph.storages.append(Storage(1000, "activations", 5, died=6))
    graph.events = []
    for index, storage in enumerate(graph.storages):
        graph.events += [(storage.born, index, 1)] if storage.born >= 0 else []
        graph.events += [(storage.died, index, -1)] if storage.died is not None else []
    graph.events.sort(key=lambda event: (event[0], -event[2]))
    return graph


def found() -> dict[str, Cut]:
    return cuts({"keep": plain(), "recompute": recomputed()}, ["a", "b"], CPU)


def test_a_run_of_operators_of_one_region_and_direction_is_one_segment() -> None:
    labels = [
        ("a", "forward"), ("b", "forward"), ("()", "forward"), ("()", "backward"), ("b", "backward"),
        ("a", "backward"), ("()", "optimizer"),
    ]  # fmt: skip
    assert [cut.labels() for cut in found().values()] == [labels, labels]
    assert found()["keep"].mates == {0: 5, 5: 0, 1: 4, 4: 1, 2: 3, 3: 2}


def test_what_a_region_keeps_for_itself_is_carried_to_its_own_backward_pass_and_counted_there() -> None:
    cut = found()["keep"]
    assert cut.segments[0].carried == [(100, 4)]
    assert cut.segments[5].pieces == [(100 + 60 + 90, frozenset())]
    assert cut.segments[5].carried == [(90, 7)], "a gradient stays"
    assert cut.before == [(7, 7)]


def test_an_output_is_shared_and_held_by_those_who_read_it_in_backward() -> None:
    for option, cut in found().items():
        shared = cut.shared[0, 0]
        assert (shared.nbytes, shared.last_read, shared.freed, shared.holders) == (200, 1, None, {4}), option
        assert [held for _, held in cut.segments[4].pieces] == [frozenset({(0, 0)})]
    assert found()["recompute"].segments[4].pieces[0][0] == 1000 + 50 + 60


def test_what_python_alone_holds_is_freed_in_forward() -> None:
    shared = found()["keep"].shared[1, 0]
    assert (shared.nbytes, shared.last_read, shared.freed, shared.holders) == (300, 2, 2, set())


def test_times_are_sums_over_the_operators() -> None:
    # 1e6 bytes at 1 GB/s: 1 ms each.
    assert [round(segment.ms, 6) for segment in found()["recompute"].segments] == [2, 1, 1, 1, 2, 1, 1]


def test_a_weight_that_autocast_casts_once_for_several_calls_of_a_region_is_no_shared_tensor() -> None:
    graph = step(
        [("a", "forward", ()), ("b", "forward", (1,)), ("a", "forward", (0,)), ("b", "backward", (1,))],
        [(10, 0, 2, "weight_casts"), (20, 0, 3, "activations")],
    )
    cut = cuts({"keep": graph}, ["a", "b"], CPU)["keep"]
    assert [shared.nbytes for shared in cut.shared.values()] == [20]
    assert cut.segments[0].carried == [(10, 1)]
    assert cut.segments[2].pieces[0][0] == 10
