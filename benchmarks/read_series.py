"""Reads one large single-frame DICOM series with medckpt and with SimpleITK's series reader, side by side.

    python benchmarks/read_series.py [--rounds 7] [--size 512 512 400] [--output benchmarks/results]

The series is written here, uncompressed. Every reading has a process of its own; the readers take turns. Time is from
the folder's name to voxels in memory (which files, headers, pixels), imports left out. Memory is the highest resident
set of the process and what reading added to it. The file cache is warm for all.

* medckpt: `read_volume(folder)`, a NumPy array in real units.
* simpleitk: `ImageSeriesReader` on `GetGDCMSeriesFileNames`, an ITK image in real units.
* simpleitk, array: the same and `GetArrayFromImage`, which is what a NumPy user needs.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {  # bits stored, signed, intercept
    "int16 as stored": (16, True, 0),
    "12 bits, -1024 HU": (12, False, -1024),
    "16 bits, -1024 HU": (16, True, -1024),
}
READERS = ("medckpt", "simpleitk", "simpleitk, array")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, nargs=3, default=(512, 512, 400), metavar=("COLUMNS", "ROWS", "SLICES"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", nargs=2, metavar=("READER", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(read_once(*given.child)))
        return 0
    rows = []
    for kind, (bits, signed, intercept) in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="series-") as folder:
            write_series(Path(folder), given.size, bits, signed, intercept)
            rows += compare(kind, folder, given.rounds)
    result = {"machine": machine(), "size": list(given.size), "rounds": given.rounds, "rows": rows}
    given.output.mkdir(parents=True, exist_ok=True)
    (given.output / "read_series.json").write_text(json.dumps(result, indent=1) + "\n")
    (given.output / "read_series.md").write_text(page(result))
    print(page(result))
    return 0


def compare(kind: str, folder: str, rounds: int) -> list[dict[str, Any]]:
    """Lets the readers take turns; checks that they read the same."""
    found: dict[str, list[dict[str, Any]]] = {reader: [] for reader in READERS}
    for _ in range(rounds + 1):  # the first fills the file cache, and is not counted
        for reader in READERS:
            command = [sys.executable, __file__, "--child", reader, folder]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found[reader].append(json.loads(run.stdout))
    if len({entry["sum"] for entries in found.values() for entry in entries}) != 1:
        raise SystemExit(f"{kind}: the readers do not read the same")
    rows = []
    for reader, entries in found.items():
        counted = entries[1:]
        row = {key: statistics.median(e[key] for e in counted) for key in ("seconds", "peak_mib", "added_mib")}
        spread = [min(e["seconds"] for e in counted), max(e["seconds"] for e in counted)]
        rows.append({"kind": kind, "reader": reader, "dtype": counted[0]["dtype"], **row, "range_seconds": spread})
    return rows


def read_once(reader: str, folder: str) -> dict[str, Any]:
    """Reads `folder` in this process; returns seconds, MiB and a sum that tells whether the voxels are the same."""
    import time

    if reader == "medckpt":
        import pydicom.pixels.utils  # noqa: F401 (loaded by the reader's module in any case)

        from medckpt.datasets.reading import read_volume
    else:
        import SimpleITK as sitk
    before = resident_mib("VmRSS")
    start = time.perf_counter()
    if reader == "medckpt":
        voxels = read_volume(Path(folder)).array
        seconds, peak = time.perf_counter() - start, resident_mib("VmHWM")
    else:
        series = sitk.ImageSeriesReader()
        series.SetFileNames(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(folder))
        image = series.Execute()
        voxels = sitk.GetArrayFromImage(image) if reader.endswith("array") else sitk.GetArrayViewFromImage(image)
        seconds, peak = time.perf_counter() - start, resident_mib("VmHWM")
    return {
        "seconds": seconds,
        "peak_mib": peak,
        "added_mib": peak - before,
        "dtype": str(voxels.dtype),
        "sum": float(voxels.sum(dtype=np.float64)),
    }


def resident_mib(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) / 1024


def write_series(folder: Path, size: tuple[int, int, int], bits: int, signed: bool, intercept: int) -> None:
    """A CT series with a header of usual length (some eighty tags, 4 KiB of a vendor's own), in shuffled file names."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

    columns, rows, slices = size
    generator = np.random.default_rng(0)
    low, high = (-(2**15), 2**15 - 1) if signed and bits == 16 else (0, 2**bits - 1)
    noise = generator.integers(low, high, (rows, columns), dtype=np.int32)
    series, study = generate_uid(), generate_uid()
    names = generator.permutation(slices)
    for k in range(slices):
        dataset = Dataset()
        dataset.SOPClassUID, dataset.SOPInstanceUID = CTImageStorage, generate_uid()
        dataset.SeriesInstanceUID, dataset.StudyInstanceUID, dataset.FrameOfReferenceUID = series, study, study
        dataset.Modality, dataset.Manufacturer, dataset.PatientID = "CT", "nobody", "none"
        dataset.ImageType = ["ORIGINAL", "PRIMARY", "AXIAL"]
        dataset.PatientPosition, dataset.SeriesDescription = "HFS", "thin slices"
        dataset.AcquisitionDate, dataset.AcquisitionTime, dataset.InstanceNumber = "20260101", "120000", k + 1
        dataset.KVP, dataset.SliceThickness, dataset.PixelSpacing = 120, 0.8, [0.75, 0.75]
        dataset.ImagePositionPatient = [-191.6, -191.6, round(0.8 * k, 4)]
        dataset.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        block = dataset.private_block(0x0019, "NOBODY", create=True)
        for number in range(50):
            block.add_new(number, "LO", f"value {number}")
        block.add_new(0x80, "OB", bytes(4096))
        dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
        dataset.Rows, dataset.Columns = rows, columns
        dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, bits, bits - 1
        dataset.PixelRepresentation = int(signed)
        dataset.RescaleSlope, dataset.RescaleIntercept = 1, intercept
        dataset.PixelData = np.roll(noise, k, axis=1).astype("<i2" if signed else "<u2").tobytes()
        dataset.file_meta = FileMetaDataset()
        dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        dataset.save_as(folder / f"IM{names[k]:05d}.dcm", enforce_file_format=True)


def machine() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("SimpleITK", "pydicom", "numpy")}
    cpu = platform.processor() or platform.machine()
    facts = Path("/proc/cpuinfo")
    if facts.is_file() and "model name" in facts.read_text():
        cpu = facts.read_text().split("model name")[1].split(":", 1)[1].split("\n")[0].strip()
    cores = f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"
    return {"cpu": cpu, "cores": cores, "date": datetime.date.today().isoformat(), **versions}


def page(result: dict[str, Any]) -> str:
    facts = result["machine"]
    size = " x ".join(map(str, result["size"]))
    lines = [
        "# Reading a DICOM series: medckpt beside SimpleITK",
        "",
        f"{facts['date']}, {facts['cpu']}, {facts['cores']}, SimpleITK {facts['SimpleITK']}, "
        f"pydicom {facts['pydicom']}, NumPy {facts['numpy']}. Written by `python benchmarks/read_series.py`.",
        "",
        f"A single-frame CT series of {size}, uncompressed, file cache warm. Medians of {result['rounds']} readings, "
        "each in a process of its own, the readers taking turns. Time is from the folder's name to voxels, without "
        "imports; memory is the highest resident set of the process, and what reading added to it.",
        "",
        "| pixels | reader | gives | time (s) | range (s) | peak (MiB) | added (MiB) |",
        "|---|---|---|--:|---|--:|--:|",
    ]
    for row in result["rows"]:
        low, high = row["range_seconds"]
        lines.append(
            f"| {row['kind']} | {row['reader']} | {row['dtype']} | {row['seconds']:.2f} | {low:.2f} to {high:.2f} | "
            f"{row['peak_mib']:.0f} | {row['added_mib']:.0f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
