"""The forecast against a real GPU, at real sizes: allocated and reserved memory, step times, and budgets kept.

One command for a machine with an NVIDIA GPU and torch 2.11 or newer:

    python benchmarks/gpu.py [--minutes 8] [--only PATTERN] [--output FOLDER] [--fresh]

It measures the GPU's own memory profile, forecasts every case without the GPU (once with the shipped profile of the
card, once with the measured one, once with the scratch memory of its convolutions measured alone), trains each for
some steps and writes results/gpu_<device>.json and .md. The most telling cases come first; what the minutes did not
suffice for is run by the next call, which goes on where this one stopped. `--dry-run` goes the same way in seconds
with tiny networks on the CPU. Exit codes: 0 all is well, 1 something failed, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import gc
import json
import multiprocessing
import os
import pickle
import platform
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:  # a checkout without an installation
    sys.path.insert(1, str(HERE.parent))

if TYPE_CHECKING:
    from torch import Tensor, nn

    from medckpt.memory.graph import StepGraph
    from medckpt.memory.profile import MemoryProfile
    from medckpt.memory.simulate import Simulation
    from medckpt.memory.step import StepRunner

CLASSES, CLIP_NORM, MIB, GIB = 14, 12.0, 2**20, 2**30
STARTED, MEASURED, OOM, TOO_LARGE = "started", "measured", "out of memory", "skipped: does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step: `policy` is "none", "monai" (the network's own use_checkpoint) or "all" (medckpt's)."""

    net: str
    side: int
    batch: int
    precision: str = "bf16-mixed"
    policy: str = "none"
    budget: bool = False
    """Whether it is run again under budgets just above and just below the forecast."""

    @property
    def name(self) -> str:
        return f"{self.net} {self.side}^3 b{self.batch} {self.precision} {self.policy}"

    @property
    def regions(self) -> Any:
        return self.policy if self.policy == "all" else None


def cases() -> list[Case]:
    """Returns all cases, the most telling first."""
    swin, nets = "swin_unetr-48", [("vit-l16", 192), ("unetr", 96), ("segresnet-32", 128), ("dynunet-32", 128)]
    first = [
        Case(net=swin, side=96, batch=2, budget=True),
        Case(net=swin, side=96, batch=2, policy="all"),
        Case(net=swin, side=96, batch=2, policy="monai"),
        *(Case(net=net, side=side, batch=1, budget=True) for net, side in nets),
        Case(net="vit-l8", side=96, batch=2),
        Case(net="mae-b16", side=96, batch=4, precision="32"),
        Case(net=swin, side=96, batch=2, precision="32"),
        Case(net=swin, side=96, batch=2, precision="16-mixed"),
    ]
    second = [Case(net=swin, side=96, batch=b, policy=p) for b in (4, 1, 8) for p in ("none", "all")]
    second += [Case(net=swin, side=128, batch=b, policy=p) for b in (1, 4, 2) for p in ("none", "all")]
    second[1] = dataclasses.replace(second[1], budget=True)
    second += [Case(net=net, side=side, batch=b, policy=p) for net, side in nets for b, p in ((1, "all"), (4, "none"))]
    third = [Case(net=swin, side=128, batch=8, policy=p) for p in ("none", "all", "monai")]
    third += [Case(net=swin, side=s, batch=b, policy="monai") for s, b in ((96, 4), (128, 1), (96, 8), (128, 2))]
    third += [Case(net=net, side=side, batch=1, precision="32") for net, side in [*nets, (swin, 128)]]
    third += [Case(net=swin, side=96, batch=b, precision="32", policy=p) for b in (1, 4) for p in ("none", "all")]
    third += [Case(net="vit-l8", side=96, batch=b, policy=p) for b in (1, 8) for p in ("none", "all")]
    third += [Case(net="mae-b16", side=96, batch=b, precision="32", policy="all") for b in (4, 16)]
    return [*first, *second, *third]


def tiny_cases() -> list[Case]:
    """Returns what `--dry-run` runs on a CPU: a case of each ending."""
    return [
        Case(net="tiny", side=16, batch=2, precision="32", budget=True),
        Case(net="tiny", side=16, batch=2, policy="all"),
        Case(net="tiny", side=65536, batch=64, precision="32"),
    ]


def build(case: Case) -> nn.Module:
    """Returns the case's network of MONAI, in training mode, on the CPU."""
    from monai.networks import nets

    patch, one = (case.side,) * 3, {"in_channels": 1, "out_channels": CLASSES}
    large = {"hidden_size": 1024, "mlp_dim": 4096, "num_layers": 24, "num_heads": 16}
    stages = {"kernel_size": [3] * 6, "strides": [1, 2, 2, 2, 2, 2], "upsample_kernel_size": [2] * 5}
    filters = [32, 64, 128, 256, 320, 320]
    builders: dict[str, Callable[[], nn.Module]] = {
        "swin_unetr-48": lambda: nets.SwinUNETR(**one, feature_size=48, use_checkpoint=case.policy == "monai"),
        "unetr": lambda: nets.UNETR(**one, img_size=patch, feature_size=16),
        "vit-l16": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=(16,) * 3, **large),
        "vit-l8": lambda: nets.ViT(in_channels=1, img_size=patch, patch_size=(8,) * 3, **large),
        # MONAI's masked autoencoder assigns values of one type to places of another under autocast: float32 only.
        "mae-b16": lambda: nets.MaskedAutoEncoderViT(in_channels=1, img_size=patch, patch_size=(16,) * 3),
        "segresnet-32": lambda: nets.SegResNet(init_filters=32, out_channels=CLASSES),
        "dynunet-32": lambda: nets.DynUNet(spatial_dims=3, **one, **stages, filters=filters),
        "tiny": lambda: nets.SegResNet(init_filters=8, out_channels=CLASSES, blocks_down=(1, 1), blocks_up=(1,)),
    }
    return builders[case.net]().train()


def inputs_and_loss(case: Case) -> tuple[Tensor, nn.Module | None]:
    """Returns an image (B, 1, D, H, W) and, for networks that segment, Dice + cross-entropy with a label of its own."""
    import torch
    from forecast import dice_cross_entropy

    shape = (case.batch, 1, *(case.side,) * 3)
    if case.net.startswith(("vit", "mae")):
        return torch.rand(shape), None
    return torch.rand(shape), dice_cross_entropy(torch.randint(0, CLASSES, shape))


# ---------------------------------------------------------------------------------------------------------- the device


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


# ------------------------------------------------------------------------------------------- three stages, a process each


def find_device(folder: Path, dry_run: bool) -> None:
    """Writes what this device is (device.json), its shipped profile and its measured one, into `folder`."""
    import monai
    import torch

    from medckpt import profiles
    from medckpt.files import write_json
    from medckpt.memory.calibrate import ConvShape, Sizes, measure_profile

    shipped = profiles.this_machine("cpu" if dry_run else "cuda")
    if dry_run:
        shape = ConvShape(batch=1, in_channels=2, out_channels=2, size=(8, 8, 8))
        tiny = Sizes(copy_bytes=MIB, matmul=64, linear=((64, 64, 64),), convs=(shape,), launches=20, repeats=2)
        shipped = dataclasses.replace(shipped, capacity_bytes=DryRun.capacity)
        measured = measure_profile("cpu", sizes=tiny)
    else:
        Gpu()  # the precision that training computes in
        measured = measure_profile("cuda")
    own = {key: getattr(shipped, key) for key in ("title", "device_names", "capacity_bytes")}
    measured = dataclasses.replace(measured, name="measured", **own)
    profiles.save_profile(shipped, folder / "shipped.yaml")
    profiles.save_profile(measured, folder / "measured.yaml")
    cuda = {} if dry_run else {"capability": list(torch.cuda.get_device_capability()), "cudnn": _cudnn()}
    facts = {
        "device": "dry run on a CPU" if dry_run else torch.cuda.get_device_name(),
        "capacity_bytes": shipped.capacity_bytes,
        "shipped_profile": shipped.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **cuda,
        "monai": monai.__version__,
        "cpu": profiles.cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    write_json(folder / "device.json", facts)


def _cudnn() -> int | None:
    import torch

    return torch.backends.cudnn.version()


def predict(case: Case, folder: Path) -> dict[str, Any]:
    """Traces a step without the device, and keeps it in `folder`; returns the forecasts of both profiles."""
    import torch

    from medckpt.memory.autocast import real_constants
    from medckpt.memory.regions import find_regions
    from medckpt.memory.step import Step
    from medckpt.memory.trace import trace_step
    from medckpt.profiles import load_profile

    torch.set_num_threads(1)
    profiles = {name: load_profile(folder / f"{name}.yaml") for name in ("shipped", "measured")}
    rules = "cpu" if profiles["shipped"].device == "cpu" else "cuda"
    net = build(case)
    image, loss = inputs_and_loss(case)
    began = time.perf_counter()
    step = Step(precision=case.precision, clip_norm=CLIP_NORM, rules=rules)  # type: ignore[arg-type]
    with real_constants():
        graph = trace_step(net, image, step, loss, recompute=find_regions(net, "all") if case.regions else ())
    with _graph_file(case, folder).open("wb") as file:
        _Pickler(file).dump(graph)
    found = {name: _figures(graph, profile) for name, profile in profiles.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "forecast_seconds": round(time.perf_counter() - began, 2),
        "unmodelled": graph.unmodelled,
        "predicted": found,
    }


class _Pickler(pickle.Pickler):
    """Writes torch's operators by name, since they cannot be pickled."""

    def reducer_override(self, value: Any) -> Any:
        from torch._ops import OpOverload

        return (_operator, (str(value),)) if isinstance(value, OpOverload) else NotImplemented


def _operator(name: str) -> Any:
    import torch

    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _graph_file(case: Case, folder: Path) -> Path:
    return folder / (re.sub(r"[^a-z0-9]+", "_", case.name.lower()) + ".pickle")


def _figures(graph: StepGraph, profile: MemoryProfile) -> dict[str, Any]:
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
        "parts": found.parts,
        "phases": phases,
    }
