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
import json
import multiprocessing
import os
import pickle
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
# This folder, and a checkout without an installation; after what is there, so that an installed medckpt goes first.
sys.path += [folder for folder in (str(HERE), str(HERE.parent)) if folder not in sys.path]

from gpu_bench import CLIP_NORM, MIB, DryRun, Gpu, figures, graph_file, train  # noqa: E402
from gpu_cases import Case, build, cases, inputs_and_loss, tiny_cases  # noqa: E402
from gpu_table import STARTED, Results, markdown, summary  # noqa: E402

if TYPE_CHECKING:
    from medckpt.memory.profile import MemoryProfile


def find_device(folder: Path, output: Path, dry_run: bool, fresh: bool) -> None:
    """Writes what this device is (device.json), its shipped profile and its measured one, into `folder`.

    The measured profile is kept in `output`, and taken from there by a later call.
    """
    import shutil

    from medckpt import profiles
    from medckpt.files import write_json

    shipped = profiles.this_machine("cpu" if dry_run else "cuda")
    if dry_run:
        shipped = dataclasses.replace(shipped, capacity_bytes=DryRun.capacity)
    facts = _facts(shipped, dry_run)
    kept = output / f"gpu_{slug(facts['device'])}_profile.yaml"
    if fresh or not kept.is_file():
        own = {key: getattr(shipped, key) for key in ("title", "device_names", "capacity_bytes")}
        profiles.save_profile(dataclasses.replace(_measure(dry_run), name="measured", **own), kept)
    shutil.copy(kept, folder / "measured.yaml")
    profiles.save_profile(shipped, folder / "shipped.yaml")
    write_json(folder / "device.json", facts)


def _measure(dry_run: bool) -> MemoryProfile:
    from medckpt.memory.calibrate import ConvShape, Sizes, measure_profile

    if not dry_run:
        Gpu()  # the precision that training computes in
        return measure_profile("cuda")
    shape = ConvShape(batch=1, in_channels=2, out_channels=2, size=(8, 8, 8))
    linear = ((64, 64, 64),)
    tiny = Sizes(copy_bytes=MIB, matmul=64, linear=linear, convs=(shape,), launches=20, repeats=2)
    return measure_profile("cpu", sizes=tiny)


def _facts(shipped: MemoryProfile, dry_run: bool) -> dict[str, Any]:
    import monai
    import torch

    from medckpt import profiles

    device: dict[str, Any] = {"device": "dry run on a CPU"}
    if not dry_run:
        device = {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "cudnn": torch.backends.cudnn.version(),
        }
    return {
        **device,
        "capacity_bytes": shipped.capacity_bytes,
        "shipped_profile": shipped.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "monai": monai.__version__,
        "cpu": profiles.cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def predict(case: Case, folder: Path) -> dict[str, Any]:
    """Traces a step without the device, and keeps it in `folder`; returns the forecasts of both profiles."""
    import torch

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
    graph = trace_step(net, image, step, loss, recompute=find_regions(net, "all") if case.policy == "all" else ())
    with graph_file(case, folder).open("wb") as file:
        _Pickler(file).dump(graph)
    found = {name: figures(graph, profile) for name, profile in profiles.items()}
    return {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "forecast_seconds": round(time.perf_counter() - began, 2),
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


def forecasts(todo: list[Case], folder: Path, context: Any, until: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the predictions by case, as many as are ready at `until`, and why others failed; on several cores."""
    from concurrent.futures.process import BrokenProcessPool

    from medckpt import machine, profiles

    # A large network takes 3 GB here.
    workers = max(1, min(len(todo), machine.cpu_count() - 1, profiles.ram_bytes() // 2**32, 8))
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    under_way = {pool.submit(predict, case, folder): case.name for case in todo}
    ready: dict[str, Any] = {}
    failed: dict[str, str] = {}
    try:
        for future in concurrent.futures.as_completed(under_way, timeout=max(1.0, until - time.time())):
            name, error = under_way[future], future.exception()
            if error is None:
                ready[name] = future.result()
            elif not isinstance(error, BrokenProcessPool):  # killed for want of memory: the next call tries again
                failed[name] = f"failed: forecast: {type(error).__name__}: {error}"
            if sys.stderr.isatty():
                print(f"\rforecast {len(ready)} of {len(todo)} without the device", end="", file=sys.stderr)
    except TimeoutError:
        pass
    print(f"\rforecast {len(ready)} of {len(todo)} without the device", file=sys.stderr)
    pool.shutdown(wait=True, cancel_futures=True)
    return ready, failed


def run_stage(context: Any, target: Callable[..., None], *arguments: Any, seconds: float) -> int | None:
    """Runs a stage in a process of its own; returns its exit code, or None if it was not done in `seconds`."""
    process = context.Process(target=target, args=arguments)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.terminate()
        process.join(10)
        return None
    return process.exitcode


def run_all(options: argparse.Namespace, folder: Path, deadline: float) -> int:
    """Runs the stages and writes JSON and page; returns the exit code."""
    # A dry run forks: its modules are loaded already. A GPU wants processes that know nothing of one another.
    context = multiprocessing.get_context("fork" if options.dry_run else "spawn")
    if run_stage(context, find_device, folder, options.output, options.dry_run, options.fresh, seconds=180) != 0:
        print("The device could not be measured: see above.", file=sys.stderr)
        return 1
    facts = json.loads((folder / "device.json").read_text())
    path = options.output / f"gpu_{slug(facts['device'])}.json"
    results = Results(path, facts, fresh=options.fresh)
    results.write([])  # with --fresh, what is stored goes now
    wanted = [case for case in (tiny_cases() if options.dry_run else cases()) if _named(case, options.only)]
    todo = [case for case in wanted if not results.done(case.name)]
    print(f"{facts['device']}: {len(todo)} of {len(wanted)} cases to run", flush=True)
    if todo:
        ready, failed = forecasts(todo, folder, context, time.time() + 0.35 * (deadline - time.time()))
        for name, why in failed.items():
            results.put(name, {"status": why})
        names = [case.name for case in todo if case.name in ready]
        while names and time.time() < deadline:
            budget = deadline - time.time() + 60
            code = run_stage(context, train, names, ready, folder, path, deadline, options.dry_run, seconds=budget)
            results = Results(path, facts)
            if code in (0, None):
                break
            for name in (name for name in names if results.rows.get(name, {}).get("status") == STARTED):
                results.put(name, {**results.rows[name], "status": f"failed: its process ended with code {code}"})
            names = [name for name in names if not results.done(name)]
    results.write([case.name for case in wanted if not results.done(case.name)])
    path.with_suffix(".md").write_text(markdown(json.loads(path.read_text())))
    total = summary(list(results.rows.values()))
    print(json.dumps(total, indent=1))
    print(path)
    return 1 if total["statuses"].get("failed") else 0


def slug(device: str) -> str:
    """Returns a device's name as a part of file names."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def _named(case: Case, only: str | None) -> bool:
    return only is None or only in case.name or fnmatch.fnmatch(case.name, only)


def main() -> int:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after this time; the next call goes on")
    parser.add_argument("--only", metavar="PATTERN", help="text in the name of a case, or a pattern: 'swin*96^3*all'")
    parser.add_argument("--output", type=Path, help="folder for the results (default: results/ beside this script)")
    parser.add_argument("--fresh", action="store_true", help="forget stored results")
    parser.add_argument("--dry-run", action="store_true", help="tiny networks on the CPU, to try this script")
    options = parser.parse_args()
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU (nvidia-smi?)"
        print(
            f"benchmarks/gpu.py needs an NVIDIA GPU, and there is none: {why}. `--dry-run` tries the script on a CPU; "
            "benchmarks/forecast.py compares on a CPU.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="medckpt_gpu_") as folder:
        if options.output is None:
            options.output = Path(tempfile.mkdtemp(prefix="medckpt_dry_run_")) if options.dry_run else HERE / "results"
        options.output.mkdir(parents=True, exist_ok=True)
        return run_all(options, Path(folder), began + 60 * options.minutes)


if __name__ == "__main__":
    sys.exit(main())
