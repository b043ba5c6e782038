"""This machine: threads, the C library's memory allocator, and what a run should record of both."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

# mallopt's numbers in glibc's malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD_BYTES = 1_000_000_000

PACKAGES = ("medckpt", "torch", "monai", "lightning", "numpy", "nibabel", "pydicom", "SimpleITK", "hydra-core")


def rank() -> int:
    """Returns the number of this process in a DDP run on this machine; 0 outside of one."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def cpu_count() -> int:
    """Returns the cores this process may use: its affinity, cut by the container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, round(int(limit) / int(period))))
    return cores


def available_bytes() -> int | None:
    """Returns how much memory this process may still take, by the system's and the container's count; None if unknown.

    An address space limit (`ulimit -v`) shows when memory is asked for, not here.
    """
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return None
    lines = dict(line.split(":", 1) for line in facts.read_text().splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return None
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text().strip()) != "max":
        # What the container has read from disk counts as used, and is given back when asked for.
        cached = re.search(r"^inactive_file (\d+)", (limit.parent / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, int(most) - int(used.read_text()) + (int(cached.group(1)) if cached else 0))
    return max(0, free)


def load_of_others() -> float | None:
    """Returns how many processes ran or waited here in the last minute, by the system's count; None if it has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep freed memory instead of giving it back; returns whether it could.

    A training step frees and asks for the same hundreds of MB again and again. By default each large block comes
    fresh from the kernel, page by page; a Swin-UNETR step on two cores became 1.3 to 3 times faster without that.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, _TOP_PAD_BYTES))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def prepare_machine(device: str) -> dict[str, Any]:
    """Sets threads and, for CPU runs, the allocator; returns what was set, for environment.json."""
    import torch

    if device != "cpu":
        # TF32 keeps float32's range at ten bits of mantissa: the usual choice for training convolutions.
        torch.set_float32_matmul_precision("high")
        return {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
    torch.set_num_threads(cpu_count())
    return {"device": platform.processor() or platform.machine(), "threads": cpu_count(), "malloc": keep_freed_memory()}


def environment(machine: dict[str, Any]) -> dict[str, Any]:
    """Returns versions and machine facts, fit for JSON."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed as a package"
    return {"python": platform.python_version(), "platform": platform.platform(), "packages": versions, **machine}


def process_peak(device: str) -> dict[str, Any]:
    """Returns the highest memory use of this process so far, and what was measured, for memory.json."""
    if device == "cuda":
        import torch

        reserved = torch.cuda.max_memory_reserved()
        return {
            "process_peak_bytes": reserved,
            "process_measure": "torch.cuda.max_memory_reserved since the first step",
        }
    unit = 1 if sys.platform == "darwin" else 1024
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"process_peak_bytes": rss, "process_measure": "largest resident set of the process"}
