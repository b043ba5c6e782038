"""The frames of enhanced and legacy-converted multi-frame images, each with the tags of a single-frame image.

Only classes whose frames carry their own place in the patient are read (Enhanced CT, MR and PET, and their
legacy-converted kin). Cine, ultrasound and everything else with several frames is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydicom.dataset import Dataset

FRAME_TAGS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")

_READ = {
    "Enhanced CT Image Storage",
    "Enhanced MR Image Storage",
    "Enhanced PET Image Storage",
    "Legacy Converted Enhanced CT Image Storage",
    "Legacy Converted Enhanced MR Image Storage",
    "Legacy Converted Enhanced PET Image Storage",
}
_NO_VOLUMES = {"US": "ultrasound", "IVUS": "ultrasound", "XA": "angiography", "RF": "fluoroscopy", "ES": "endoscopy"}
# Keyword of the single-frame tag -> where a functional group holds it: (group, keyword), the first that is there.
_PLACES: dict[str, tuple[tuple[str, str], ...]] = {
    "ImagePositionPatient": (("PlanePositionSequence", "ImagePositionPatient"),),
    "ImageOrientationPatient": (("PlaneOrientationSequence", "ImageOrientationPatient"),),
    "PixelSpacing": (("PixelMeasuresSequence", "PixelSpacing"),),
    "SliceThickness": (("PixelMeasuresSequence", "SliceThickness"),),
    "SpacingBetweenSlices": (("PixelMeasuresSequence", "SpacingBetweenSlices"),),
    "EchoTime": (("MREchoSequence", "EffectiveEchoTime"),),
    "DiffusionBValue": (("MRDiffusionSequence", "DiffusionBValue"),),
    "TemporalPositionIdentifier": (("FrameContentSequence", "TemporalPositionIndex"),),
    "AcquisitionNumber": (("FrameContentSequence", "FrameAcquisitionNumber"),),
    "AcquisitionTime": (("FrameContentSequence", "FrameAcquisitionDateTime"),),
    "ImageType": (
        ("MRImageFrameTypeSequence", "FrameType"),
        ("CTImageFrameTypeSequence", "FrameType"),
        ("PETFrameTypeSequence", "FrameType"),
    ),
}
# A legacy-converted object keeps what its classes have no group for among the unassigned attributes.
_UNASSIGNED = ("UnassignedPerFrameConvertedAttributesSequence", "UnassignedSharedConvertedAttributesSequence")
_RESCALE = ("RescaleSlope", "RescaleIntercept")


def frames_problem(dataset: Dataset, frames: int, sop_class: str, modality: str, several: bool) -> str | None:
    """Says why the frames of a file make no volume; None if they can be placed, or if there is one image only."""
    if modality in _NO_VOLUMES or "Ultrasound" in sop_class:
        what = _NO_VOLUMES.get(modality, "ultrasound")
        return (
            f"{what} ({frames} frames, {sop_class or 'no SOP class'}), no volume of measurements; use a CT or MR series"
        )
    if not several:
        return None
    what = f"multi-frame ({frames} frames in one file, {sop_class or 'no SOP class'})"
    if sop_class not in _READ:
        return f"{what}, whose frames have no places in the patient (a cine?); convert it to NIfTI or to single frames"
    groups = dataset.get("PerFrameFunctionalGroupsSequence")
    if groups is None or len(groups) != frames:  # highdicom would not read it either
        there = "none" if groups is None else str(len(groups))
        return f"{what} with functional groups for {there} of its frames; export it again from the archive"
    return None


def frame_tags(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """Yields, per frame, the top-level tags with those of its functional groups under their single-frame keywords."""
    shared_items = dataset.get("SharedFunctionalGroupsSequence") or []
    shared = shared_items[0] if len(shared_items) else Dataset()
    plain = {e.keyword: e.value for e in dataset if e.keyword and e.keyword not in (*FRAME_TAGS, *_PLACES)}
    common = _values(shared, Dataset())
    for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        yield plain | common | _values(frame, shared) | {"InstanceNumber": number + 1}


def _values(groups: Dataset, fallback: Dataset) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword, places in _PLACES.items():
        found = _first(groups, places)
        if found is not None:
            values[keyword] = found
    transform = _item(groups, "PixelValueTransformationSequence")
    if transform is None and _item(fallback, "PixelValueTransformationSequence") is None:
        transform = next((item for name in _UNASSIGNED if (item := _item(groups, name)) is not None), None)
    for keyword in _RESCALE:
        if transform is not None and transform.get(keyword) is not None:
            values[keyword] = transform[keyword].value
    return values


def _first(groups: Dataset, places: Sequence[tuple[str, str]]) -> Any:
    for sequence, keyword in places:
        item = _item(groups, sequence)
        if item is not None and item.get(keyword) is not None:
            return item[keyword].value
    return None


def _item(groups: Dataset, sequence: str) -> Dataset | None:
    items = groups.get(sequence)
    return items[0] if items else None
