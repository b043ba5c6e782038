"""Folders as media and archives leave them: a DICOMDIR with files of no suffix, sub-folders, links."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydicom.dataset import Dataset
from pydicom.uid import MediaStorageDirectoryStorage

from medckpt.datasets.reading import read_volume
from medckpt.errors import DataError
from tests.cases.dicom_planes import assert_placed, pattern, stacked
from tests.datasets.dicom_maker import SERIES_UID, make_slice, save_slice


@pytest.fixture
def medium(tmp_path: Path) -> Path:
    """Six slices as DICOM/A/IM0 ... and DICOM/B/IM3 ..., listed in a DICOMDIR."""
    records = [record("SERIES", SeriesInstanceUID=SERIES_UID)]
    for k in range(6):
        place = ["DICOM", "A" if k < 3 else "B", f"IM{k}"]
        save_slice(tmp_path.joinpath(*place), make_slice(k, pixels=pattern(k), **stacked("coronal")))  # type: ignore[arg-type]
        records.append(record("IMAGE", ReferencedFileID=place))
    records += [record("SERIES", SeriesInstanceUID="1.2.3"), record("IMAGE", ReferencedFileID=["DICOM", "C", "IM9"])]
    contents = Dataset()
    contents.SOPClassUID = MediaStorageDirectoryStorage
    contents.DirectoryRecordSequence = records
    save_slice(tmp_path / "DICOMDIR", contents)
    return tmp_path


def record(kind: str, **tags: object) -> Dataset:
    item = Dataset()
    item.DirectoryRecordType = kind
    item.RecordInUseFlag = 0xFFFF
    for name, value in tags.items():
        setattr(item, name, value)
    return item


def test_a_medium_is_read_by_its_folder_or_its_list(medium: Path) -> None:
    for path in (medium, medium / "DICOMDIR"):
        assert_placed(read_volume(path), "coronal", range(6))


def test_a_last_slice_that_the_list_knows_of_is_missed(medium: Path) -> None:
    """Its loss leaves no gap; that of another series (listed, and not there) does not matter."""
    (medium / "DICOM" / "B" / "IM5").unlink()
    with pytest.raises(DataError, match=r"DICOMDIR: 1 of the 6 images .* not there: DICOM/B/IM5\. Copy the medium"):
        read_volume(medium)


def test_a_damaged_list_does_no_harm(medium: Path) -> None:
    whole = (medium / "DICOMDIR").read_bytes()
    (medium / "DICOMDIR").write_bytes(whole[:400])
    assert_placed(read_volume(medium), "coronal", range(6))


def test_a_link_to_the_folder_itself_ends(medium: Path) -> None:
    (medium / "DICOM" / "again").symlink_to(medium)
    assert_placed(read_volume(medium), "coronal", range(6))
