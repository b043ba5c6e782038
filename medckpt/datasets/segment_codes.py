"""What a class is in the words of DICOM: category, type and laterality of a segment, from dataset.json or by its name.

The codes are those of the standard's own tables, as pydicom carries them: CID 7192 (anatomical structures), CID 7194
(morphologically abnormal structures) and CID 7191 (tissues). A name that is in none of them is "Tissue", as dcmqi has
it; a code that dataset.json gives under "medckpt" wins:

    "medckpt": {"codes": {"tumour": {"type": ["108369006", "SCT", "Neoplasm"],
                                     "category": ["49755003", "SCT", "Morphologically Abnormal Structure"]}}}
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from medckpt.errors import ConfigError

Code = tuple[str, str, str]
"""Code value, coding scheme designator, code meaning."""

_LARGEST = (16, 16, 64)  # characters of value, scheme and meaning (VR SH, SH and LO)

# What segmenters write for a concept of the tables, without case, blanks and marks.
_ALIASES = {
    "airway": "AirwayStructure",
    "body": "EntireBody",
    "bone": "BoneTissue",
    "bowel": "SmallIntestine",
    "csf": "CerebrospinalFluid",
    "enhancingtumor": "EnhancingLesion",
    "enhancingtumour": "EnhancingLesion",
    "fat": "AdiposeTissue",
    "gallbladder": "Gallbladder",
    "iliacvena": "CommonIliacVein",
    "ivc": "InferiorVenaCava",
    "lunglowerlobe": "LowerLobeOfLung",
    "lungmiddlelobe": "MiddleLobeOfRightLung",
    "lungupperlobe": "UpperLobeOfLung",
    "metastasis": "NeoplasmSecondary",
    "muscle": "MuscleTissue",
    "oedema": "Edema",
    "oesophagus": "Esophagus",
    "postcava": "InferiorVenaCava",
    "smallbowel": "SmallIntestine",
    "tumor": "Neoplasm",
    "tumour": "Neoplasm",
    "urinarybladder": "Bladder",
}
_CATEGORY_OF_TABLE = {
    "CID7192": "AnatomicalStructure",
    "CID7194": "MorphologicallyAbnormalStructure",
    "CID7191": "Tissue",
}
_VERTEBRA = re.compile(r"vertebrae?([ctls]\d{1,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCode:
    """The coded meaning of one class; a type without a category is an anatomical structure.

    Raises:
        ConfigError: a part is empty or longer than DICOM takes (16, 16 and 64 characters).
    """

    type: Code
    category: Code | None = None
    modifier: Code | None = None
    """Laterality, for example ("7771000", "SCT", "Left")."""

    def __post_init__(self) -> None:
        problems = [
            f"{name}: {list(code)} is no [value, scheme, meaning] of at most {', '.join(map(str, _LARGEST))} letters."
            for name, code in (("type", self.type), ("category", self.category), ("modifier", self.modifier))
            if code is not None
            and any(not part.strip() or len(part) > most for part, most in zip(code, _LARGEST, strict=True))
        ]
        if problems:
            raise ConfigError("\n".join(problems))


def default_code(name: str) -> SegmentCode:
    """Returns the code of a class by its name ("liver", "kidney_left", "Left Kidney", "vertebrae_L1"), else Tissue."""
    words = re.findall(r"[a-z]+|\d+", name.lower())
    side = next((word for word in words if word in ("left", "right")), None)
    found = _concept("".join(words))
    if found is not None or side is None:
        return found or _tissue()
    plain = _concept("".join(word for word in words if word != side))
    if plain is None:
        return _tissue()
    return SegmentCode(type=plain.type, category=plain.category, modifier=_coded("SCT", side.capitalize()))


def _concept(name: str) -> SegmentCode | None:
    """The entry of the three tables whose keyword is `name` (lower case, letters and digits only)."""
    from pydicom.sr.codedict import codes

    vertebra = _VERTEBRA.fullmatch(name)
    sought = f"{vertebra[1]}vertebra" if vertebra else _ALIASES.get(name, name).lower()
    for table, category in _CATEGORY_OF_TABLE.items():
        keywords = {keyword.lower(): keyword for keyword in getattr(codes, table).dir()}
        keyword = keywords.get(sought) or keywords.get(sought.removesuffix("s"))
        if keyword is not None:
            return SegmentCode(type=_coded(table, keyword), category=_coded("CID7150", category))
    return None


def _tissue() -> SegmentCode:
    return SegmentCode(type=_coded("CID7191", "Tissue"), category=_coded("CID7150", "Tissue"))


def _coded(table: str, keyword: str) -> Code:
    from pydicom.sr.codedict import codes

    code = getattr(getattr(codes, table), keyword)
    return code.value, code.scheme_designator, code.meaning
