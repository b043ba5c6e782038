"""Public fault reports D19 to D34: what the stored numbers mean, names, patients that lie otherwise, large series."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence as DicomSequence
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVRLittleEndian

from medckpt.datasets.reading import read_grid, read_volume
from medckpt.errors import DataError
from tests.cases.dicom_planes import PLANES, assert_placed, every_plane, logged, pattern, stacked
from tests.datasets.dicom_maker import COLUMNS, ROWS, make_frames, make_series, make_slice, save_slice


def full(value: int, dtype: type[np.generic]) -> np.ndarray:
    return np.full((ROWS, COLUMNS), value, dtype)


@pytest.mark.parametrize(
    ("stored", "bits", "hu", "dtype"),
    [
        (24, 12, -1000, np.int16),
        (4095, 12, 3071, np.int16),
        (24, 16, -1000, np.float32),  # the bits allow 64511, which int16 does not hold
        (65535, 16, 64511, np.float32),
    ],
)
def test_d19_unsigned_with_negative_intercept(
    tmp_path: Path, stored: int, bits: int, hu: int, dtype: type[np.generic]
) -> None:
    tags = {"BitsStored": bits, "HighBit": bits - 1, "RescaleSlope": 1, "RescaleIntercept": -1024}
    volume = read_volume(make_series(tmp_path, pixels=full(stored, np.uint16), **tags))
    assert volume.array.dtype == dtype
    assert np.unique(volume.array).tolist() == [hu]


@pytest.mark.parametrize(
    ("stored", "kind", "intercept", "value"),
    [
        (-32768, np.int16, 0, -32768),
        (-32768, np.int16, -1024, -33792),
        (32767, np.int16, 1000, 33767),
        (34101, np.uint16, 0, 34101),
        (65535, np.uint16, 0, 65535),
        (65535, np.uint16, -32768, 32767),
        (0, np.uint16, -32768, -32768),
    ],
)
def test_d20_extreme_values_do_not_wrap(
    tmp_path: Path, stored: int, kind: type[np.generic], intercept: int, value: int
) -> None:
    volume = read_volume(make_series(tmp_path, pixels=full(stored, kind), RescaleIntercept=intercept))
    assert np.unique(volume.array).tolist() == [value]


@pytest.mark.parametrize(("slope", "expected"), [(-1, 32768), (2, -65536), (-3, 98304)])
def test_d20_whole_slopes_do_not_wrap(tmp_path: Path, slope: int, expected: int) -> None:
    volume = read_volume(make_series(tmp_path, pixels=full(-32768, np.int16), RescaleSlope=slope))
    assert np.unique(volume.array).tolist() == [expected]


@pytest.mark.parametrize(("signed", "word", "value"), [(1, 0x0FFF, -1), (1, 0x0800, -2048), (0, 0xF00A, 10)])
def test_d20_bits_above_bits_stored(
    tmp_path: Path, signed: int, word: int, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No sign extension, and an overlay in the upper bits: only BitsStored bits are the number."""
    tags = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": signed}
    make_series(tmp_path, pixels=full(word, np.uint16), **tags)
    with logged(caplog):
        assert np.unique(read_volume(tmp_path).array).tolist() == [value]
    assert f"{6 * ROWS * COLUMNS} pixels had something in the bits above BitsStored" in caplog.text
    assert pydicom.dcmread(tmp_path / "0.dcm").pixel_array[0, 0] == value  # pydicom's reading of the same rule


@pytest.mark.parametrize("tag", ["BitsAllocated", "BitsStored", "PixelRepresentation"])
@pytest.mark.parametrize("victims", [range(6), [3]])
def test_numbers_without_their_tags_are_no_guess(tmp_path: Path, tag: str, victims: list[int]) -> None:
    """Read as unsigned, -1000 would be 64536; one slice of a series is no better than all of them."""
    for k in range(6):
        dataset = make_slice(k, pixels=np.full((ROWS, COLUMNS), -1000, np.int16))
        save_slice(tmp_path / f"{k}.dcm", dataset)
        if k in victims:
            delattr(dataset, tag)
            dataset.save_as(tmp_path / f"{k}.dcm")
    for read in (read_grid, read_volume):
        with pytest.raises(DataError, match=f"no usable {tag}, so that its numbers cannot be told"):
            read(tmp_path)


def test_d20_bits_of_another_place_are_refused(tmp_path: Path) -> None:
    make_series(tmp_path, BitsStored=12, HighBit=15)
    with pytest.raises(DataError, match="HighBit 15 beside BitsStored 12"):
        read_volume(tmp_path)


@pytest.mark.parametrize("syntax", [ExplicitVRBigEndian, ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian])
def test_d20_every_way_to_store_plain_pixels(tmp_path: Path, syntax: str) -> None:
    for k in range(6):
        dataset = make_slice(k, pixels=pattern(k), **stacked("sagittal"))  # type: ignore[arg-type]
        if syntax == ExplicitVRBigEndian:
            dataset.PixelData = pattern(k).astype(">i2").tobytes()
            dataset["PixelData"].VR = "OW"
        save_slice(tmp_path / f"{k}.dcm", dataset, syntax=syntax)
    assert_placed(read_volume(tmp_path), "sagittal", range(6))


@pytest.mark.parametrize(("kind", "top"), [(np.uint8, 255), (np.int32, 2**20)])
def test_d20_other_words(tmp_path: Path, kind: type[np.generic], top: int) -> None:
    pixels = full(0, kind)
    pixels[3, 4] = top
    bits = np.dtype(kind).itemsize * 8
    make_series(tmp_path, pixels=pixels, BitsAllocated=bits, BitsStored=bits, HighBit=bits - 1)
    array = read_volume(tmp_path).array
    assert np.argwhere(array).tolist() == [[4, 3, k] for k in range(6)]
    assert array.max() == top


@every_plane
def test_d22_slope_of_each_slice(tmp_path: Path, plane: str) -> None:
    make_series(
        tmp_path,
        ks=[0, 2, 1, 5, 3, 4],
        pixels=full(10, np.int16),
        RescaleSlope=lambda k: 1 + k,
        RescaleIntercept=lambda k: -k,
        **stacked(plane),
    )
    assert read_volume(tmp_path).array[0, 0].tolist() == [10, 19, 28, 37, 46, 55]


def test_d22_small_digits_survive_a_large_intercept(tmp_path: Path) -> None:
    make_series(tmp_path, pixels=full(30001, np.int16), RescaleSlope=0.1, RescaleIntercept=-3000)
    np.testing.assert_array_equal(np.unique(read_volume(tmp_path).array), np.float32(0.1 * 30001 - 3000))


def test_d23_monochrome1_stays_as_stored_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, pixels=pattern, PhotometricInterpretation="MONOCHROME1", **stacked("axial"))
    with logged(caplog):
        volume = read_volume(tmp_path)
    assert_placed(volume, "axial", range(6))
    assert volume.notes == ("MONOCHROME1 in 6 slices; values stay as stored, not inverted",)
    assert "MONOCHROME1 in 6 slices" in caplog.text


@pytest.mark.parametrize("folder", ["Sättiger_肺", "Ελλάδα", "Żółć i łódź", "émigré, naïve", "🩻", "x" * 200])
def test_d25_folders_of_any_name(tmp_path: Path, folder: str) -> None:
    assert_placed(read_volume(make_series(tmp_path / folder, pixels=pattern, **stacked("axial"))), "axial", range(6))


@pytest.mark.parametrize("prefix", ["1·", "肺", "IM 0 ", "%20[", "🩻"])
def test_d26_files_of_any_name(tmp_path: Path, prefix: str) -> None:
    make_series(tmp_path, prefix=prefix, pixels=pattern, **stacked("axial"))
    assert_placed(read_volume(tmp_path), "axial", range(6))
    assert_placed(read_volume(tmp_path / f"{prefix}3.dcm"), "axial", range(6))


@pytest.mark.parametrize("lying", ["FFP", "FFS", "HFP", "HFDR", "FFDL"])
@every_plane
def test_d28_orientation_and_not_patient_position(
    tmp_path: Path, plane: str, lying: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_series(tmp_path, pixels=pattern, PatientPosition=lying, **stacked(plane))
    with logged(caplog):
        assert_placed(read_volume(tmp_path), plane, range(6))
    assert f"PatientPosition is {lying}, not HFS" in caplog.text


def test_d28_head_first_supine_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_series(tmp_path, PatientPosition="HFS")
    with logged(caplog):
        read_volume(tmp_path)
    assert "PatientPosition" not in caplog.text


def limited(megabytes: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Reads a folder in a process that may take `megabytes` more address space than it has after its imports."""
    program = (
        "import pathlib, resource, sys\n"
        "from medckpt.datasets.reading import read_volume\n"
        "from medckpt.errors import DataError\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        f"limit = pages * resource.getpagesize() + {megabytes} * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try:\n    print(read_volume(pathlib.Path(sys.argv[1])).array.shape)\n"
        "except DataError as error:\n    print(error)\n"
        "    sys.exit(2)\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_d30_two_thousand_slices_in_little_memory(tmp_path: Path) -> None:
    whole = save_slice(tmp_path / "0.dcm", make_slice(0, pixels=full(1, np.int16)[:, :8])).read_bytes()
    mark = b"0.0\\0.0\\0.0 "
    assert whole.count(mark) == 1
    for k in range(2000):
        (tmp_path / f"{k}.dcm").write_bytes(whole.replace(mark, f"0.0\\0.0\\{k:04d}".encode()))
    run = limited(300, tmp_path)
    assert (run.returncode, run.stdout) == (0, "(8, 8, 2000)\n"), run.stderr


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_AS") or sys.platform != "linux", reason="needs /proc and RLIMIT_AS")
def test_d30_more_voxels_than_memory_end_in_a_message(tmp_path: Path) -> None:
    frames = make_frames(tmp_path / "mf.dcm", range(400), pixels=lambda k: np.zeros((64, 64), np.int16))
    small, large = 400 * 64 * 64 * 2, 400 * 512 * 512 * 2
    head = frames.read_bytes()[:-small]
    rows_and_columns = bytes.fromhex("28001000555302004000") + bytes.fromhex("28001100555302004000")
    assert head.count(rows_and_columns) == 1
    assert head.endswith(small.to_bytes(4, "little"))
    head = head.replace(rows_and_columns, rows_and_columns.replace(b"\x40\x00", b"\x00\x02"))
    with frames.open("wb") as file:  # a hole in the file: no disk, and all zeros when read
        file.write(head[:-4] + large.to_bytes(4, "little"))
        file.truncate(len(head) + large)
    run = limited(150, tmp_path)
    assert run.returncode == 2, run.stderr
    assert "512 x 512 x 400 voxels take 200.0 MiB of memory" in run.stdout


def test_d30_memory_is_estimated_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_series(tmp_path)
    monkeypatch.setattr("medckpt.datasets.dicom.available_bytes", lambda: 900)
    with pytest.raises(DataError, match=r"10 x 8 x 6 voxels take 0\.9 KiB of memory, and 0\.9 KiB are free"):
        read_volume(tmp_path)


def test_d30_a_header_that_promises_too_much(tmp_path: Path) -> None:
    save_slice(tmp_path / "0.dcm", make_slice(0, SliceThickness=1, Rows=60000, Columns=60000))
    with pytest.raises(DataError, match=r"the headers promise 6\.71 GiB of voxels"):
        read_volume(tmp_path)


def test_d32_a_segmentation_is_no_image(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Writing and reading DICOM-SEG has tests of its own; as an image it is named and set aside."""
    save_slice(tmp_path / "seg.dcm", make_slice(3, Modality="SEG", NumberOfFrames=1))
    with pytest.raises(DataError, match=r"no DICOM image .*seg\.dcm \(SEG\)"):
        read_volume(tmp_path)
    make_series(tmp_path, pixels=pattern, **stacked("axial"))
    with logged(caplog):
        assert_placed(read_volume(tmp_path), "axial", range(6))
    assert "seg.dcm (SEG)" in caplog.text


@every_plane
def test_d34_position_in_a_private_sequence(tmp_path: Path, plane: str) -> None:
    for k in range(6):
        dataset = make_slice(k, pixels=pattern(k), **stacked(plane))  # type: ignore[arg-type]
        item = Dataset()
        item.ImagePositionPatient = [99, 99, -99 * k]
        item.ImageOrientationPatient = list(PLANES["axial"])
        item.PixelSpacing = [9, 9]
        for group, creator in ((0x2005, "Philips MR Imaging DD 005"), (0x0021, "SIEMENS MR SDS 01")):
            dataset.private_block(group, creator, create=True).add_new(0x0F, "SQ", DicomSequence([item]))
        save_slice(tmp_path / f"{k}.dcm", dataset)
    assert_placed(read_volume(tmp_path), plane, range(6))
    assert read_grid(tmp_path) == read_volume(tmp_path).grid


@pytest.mark.parametrize("tag", ["RescaleSlope", "RescaleIntercept"])
@pytest.mark.parametrize("lacking", [0, 3, 5])
def test_a_slice_that_lost_its_scale_is_refused(tmp_path: Path, tag: str, lacking: int) -> None:
    folder = make_series(tmp_path, RescaleSlope=1, RescaleIntercept=-1024)
    file = sorted(folder.glob("*.dcm"))[lacking]
    dataset = pydicom.dcmread(file)
    delattr(dataset, tag)
    dataset.save_as(file)
    with pytest.raises(DataError, match=rf"{tag} is missing in 1 of 6 slices \({file.name}\)"):
        read_volume(folder)
