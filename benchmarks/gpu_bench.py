"""Trains the cases of `gpu.py` on the device, and measures them there."""

from __future__ import annotations

import dataclasses
import gc
import json
import pickle
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_cases import Case, build, cases, inputs_and_loss, tiny_cases
from gpu_table import MEASURED, OOM, STARTED, TOO_LARGE, Results, line

if TYPE_CHECKING:
    from torch import nn

    from medckpt.memory.graph import StepGraph
    from medckpt.memory.profile import MemoryProfile
    from medckpt.memory.step import StepRunner

MIB = 2**20
CLIP_NORM = 12.0
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "find a valid cuDNN algorithm", "FIND was unable to find an engine")


class Gpu:
    """The current CUDA device, as a training has it."""

    kind = "cuda"

    def __init__(self) -> None:
        import torch

        torch.set_float32_matmul_precision("high")  # as medckpt trains
        self.cuda = torch.cuda
        self.capacity = torch.cuda.get_device_properties(0).total_memory

    def clean(self) -> None:
        """Gives back all that no tensor holds, cuBLAS's workspaces too, and counts anew."""
        import torch

        gc.collect()
        self.cuda.synchronize()
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        self.cuda.empty_cache()
        self.cuda.reset_peak_memory_stats()

    def limit(self, nbytes: int | None) -> None:
        """Lets the allocator take no more than `nbytes` from the device."""
        self.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / self.capacity))

    def watched_step(self, runner: StepRunner) -> dict[str, int]:
        """Runs one step; returns the highest allocated bytes of each phase."""
        peaks: dict[str, int] = {}
        under_way = ["before"]

        def phase(name: str) -> None:
            # The allocator counts when kernels are queued: nothing has to be waited for.
            peaks[under_way[0]] = max(peaks.get(under_way[0], 0), self.cuda.max_memory_allocated())
            self.cuda.reset_peak_memory_stats()
            under_way[0] = name

        self.cuda.reset_peak_memory_stats()
        runner.run(phase)
        phase("after")
        del peaks["before"]
        return peaks

    def seconds(self, run: Callable[[], None]) -> float:
        """Returns how long `run` takes until its last kernel has ended."""
        self.cuda.synchronize()
        began = time.perf_counter()
        run()
        self.cuda.synchronize()
        return time.perf_counter() - began

    def reserved(self) -> int:
        """Returns what the allocator holds of the device: it gives nothing back between two calls of `clean`."""
        return self.cuda.memory_reserved()


class DryRun:
    """A CPU in a GPU's place, so that every line of this script runs without one."""

    kind = "cpu"
    capacity = 64 * MIB

    def __init__(self) -> None:
        self.highest, self.most = 0, self.capacity

    def clean(self) -> None:
        gc.collect()
        self.highest = 0

    def limit(self, nbytes: int | None) -> None:
        self.most = self.capacity if nbytes is None else nbytes

    def watched_step(self, runner: StepRunner) -> dict[str, int]:
        import torch

        from medckpt.memory.measure import allocations

        held = sum(tensor.nbytes for tensors in runner.held().values() for tensor in tensors)
        peak = held + allocations(runner.run).peak
        self.highest = max(self.highest, peak)
        if peak > self.most:
            raise torch.OutOfMemoryError(f"{peak} bytes, and {self.most} are allowed")
        return {"backward": peak}

    def seconds(self, run: Callable[[], None]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    def reserved(self) -> int:
        return self.highest


def train(
    names: list[str], predictions: dict[str, Any], folder: Path, results: Path, deadline: float, dry: bool
) -> None:
    """Measures the cases by `names` until `deadline` (seconds since the epoch) and writes each into `results`.

    A CUDA error ends the process, since nothing can be done on the device after it.
    """
    device = DryRun() if dry else Gpu()
    store = Results(results, json.loads((folder / "device.json").read_text()))
    known = {case.name: case for case in (tiny_cases() if dry else cases())}
    bench = _Bench(device, folder)
    for number, name in enumerate(names):
        row = {**dataclasses.asdict(known[name]), "status": STARTED, **predictions[name]}
        forecast = row["predicted"]["shipped"]
        fits = forecast["with_context"][0] <= device.capacity
        step_ms = forecast["step_ms"] or row["predicted"]["measured"]["step_ms"] or 0
        if fits and time.time() + 5 + 12 * step_ms / 1e3 > deadline:
            continue  # a shorter one may still be done in time
        store.put(name, row)
        fatal = False
        try:
            if fits:
                bench.run(known[name], row)
            else:
                row["status"] = TOO_LARGE
        except Exception as error:
            row["status"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            fatal = "CUDA error" in str(error)
        store.put(name, row)
        print(f"[{number + 1}/{len(names)}] {line(name, row)}", flush=True)
        if fatal:
            raise SystemExit(1)


class _Bench:
    """Trains cases on the device."""

    def __init__(self, device: Gpu | DryRun, folder: Path) -> None:
        from medckpt.profiles import load_profile

        self.device, self.folder = device, folder
        self.profile = load_profile(folder / "measured.yaml")
        self.nets: dict[tuple[str, int, bool], nn.Module] = {}
        self.scratch: dict[str, int] = {}
        """Measured scratch bytes by an operator's signature: many cases share them."""

    def run(self, case: Case, row: dict[str, Any]) -> None:
        """Completes `row`: status, what was measured, and how far the forecasts were off."""
        with graph_file(case, self.folder).open("rb") as file:
            graph = pickle.load(file)
        self.device.clean()
        profile = dataclasses.replace(self.profile, workspaces=self._workspaces(graph))
        row["predicted"]["scratch"] = figures(graph, profile)
        row["status"], measured = self.attempt(case, None, timed=True)
        row["measured"] = measured
        if row["status"] != MEASURED:
            return
        row["error_percent"] = {
            kind: round(100 * (found["allocated_bytes"] / measured["allocated_bytes"] - 1), 3)
            for kind, found in row["predicted"].items()
        }
        if case.budget:
            row["budgets"] = self._budgets(case, row["predicted"]["scratch"])

    def attempt(self, case: Case, limit: int | None, *, timed: bool) -> tuple[str, dict[str, Any]]:
        """Trains the case with at most `limit` bytes; returns how it ended and what was measured."""
        import torch

        self.device.clean()
        self.device.limit(limit)
        try:
            status, found = MEASURED, self._train(case, timed)
        except RuntimeError as error:  # cuDNN and cuBLAS have words of their own for it
            message = str(error).splitlines()[0] if str(error) else ""
            if not isinstance(error, torch.OutOfMemoryError) and not any(word in message for word in _NO_MEMORY):
                raise
            status, found = OOM, {"message": message}
        self.device.limit(None)
        self.device.clean()
        return status, found

    def _train(self, case: Case, timed: bool) -> dict[str, Any]:
        import copy

        from medckpt.memory.apply import apply_recompute
        from medckpt.memory.regions import find_regions
        from medckpt.memory.step import Step, StepRunner

        kind = self.device.kind
        key = (case.net, case.side, case.policy == "monai")
        if key not in self.nets:
            self.nets[key] = build(case)
        net = copy.deepcopy(self.nets[key]).to(kind)
        if case.policy == "all":
            apply_recompute(net, find_regions(net, "all"))
        image, loss = inputs_and_loss(case)
        step = Step(precision=case.precision, clip_norm=CLIP_NORM, rules=kind)  # type: ignore[arg-type]
        runner = StepRunner(net, image.to(kind), None if loss is None else loss.to(kind), step, device=kind)
        del image, loss
        self.device.clean()
        first = self.device.watched_step(runner)
        net.zero_grad(set_to_none=True)
        phases = self.device.watched_step(runner)
        net.zero_grad(set_to_none=True)
        seconds: list[float] = []
        while timed and (len(seconds) < 3 or (sum(seconds) < 1.5 and len(seconds) < 10)):
            seconds.append(self.device.seconds(runner.run))
            net.zero_grad(set_to_none=True)
        return {
            "allocated_bytes": max(phases.values()),
            "first_step_allocated_bytes": max(first.values()),
            "reserved_bytes": self.device.reserved(),
            "phases": phases,
            "step_ms": round(1e3 * statistics.median(seconds), 2) if seconds else None,
            "steps": len(seconds),
        }

    def _workspaces(self, graph: StepGraph) -> dict[str, int]:
        """Returns the measured scratch memory of those convolutions that could set the peak, by signature."""
        import torch

        from medckpt.memory.simulate import simulate
        from medckpt.memory.workspace import estimate, has_scratch, measure_scratch

        moments = simulate(graph, self.profile).timeline
        guesses = [estimate(op, self.profile) for op in graph.ops]
        live = [moment.nbytes - guess[1] for moment, guess in zip(moments, guesses, strict=True)]
        order = sorted(range(len(live)), key=lambda index: live[index] + guesses[index][2], reverse=True)
        found: dict[str, int] = {}
        highest = max(live)
        for index in order:
            op = graph.ops[index]
            if len(found) >= 24 or live[index] + 2 * guesses[index][2] <= highest:
                break  # twice: the highest guess is one
            if not has_scratch(op):
                continue
            signature = op.signature()
            if signature not in self.scratch:
                try:
                    self.scratch[signature] = measure_scratch(op, device=self.device.kind)
                except torch.OutOfMemoryError:
                    self.device.clean()
                    continue
            found[signature] = self.scratch[signature]
            highest = max(highest, live[index] + found[signature])
        self.device.clean()
        return found

    def _budgets(self, case: Case, predicted: dict[str, Any]) -> list[dict[str, Any]]:
        """Trains under a budget that must do, and under one that cannot."""
        above = predicted["reserved_interval"][1] + 2 * MIB
        below = int(0.98 * predicted["allocated_interval"][0])
        rows = []
        for limit, expected in ((above, MEASURED), (below, OOM)):
            status, _ = self.attempt(case, limit, timed=False)
            rows.append({"limit_bytes": limit, "expected": expected, "status": status, "kept": status == expected})
        return rows


def figures(graph: StepGraph, profile: MemoryProfile) -> dict[str, Any]:
    """Returns a forecast as plain figures; allocated and reserved without the context, as torch counts them."""
    from medckpt.memory.simulate import simulate

    found = simulate(graph, profile)
    low, high = profile.context_bytes
    phases: dict[str, int] = {}
    for moment in found.timeline:
        phase = "backward" if moment.phase == "recompute" else moment.phase
        phases[phase] = max(phases.get(phase, 0), moment.nbytes - found.parts["context"])
    return {
        "allocated_bytes": found.allocated_bytes,
        "allocated_interval": [found.peak_interval[0] - low, found.peak_interval[1] - high],
        "reserved_interval": [found.reserved_bytes[0] - low, found.reserved_bytes[1] - high],
        "with_context": list(found.reserved_bytes),
        "step_ms": found.step_ms,
        "where": str(found.where),
        "unmodelled": found.unmodelled,
        "parts": found.parts,
        "phases": phases,
    }


def graph_file(case: Case, folder: Path) -> Path:
    """Returns where the trace of a case lies."""
    return folder / (re.sub(r"[^a-z0-9]+", "_", case.name.lower()) + ".pickle")
