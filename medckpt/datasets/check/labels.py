"""Label values over the whole data set: those that no one names, gaps, a remap that would close them, intensities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from medckpt.datasets.check.findings import CaseCheck, Finding, LabelRow
from medckpt.errors import listing

MANY_VALUES = 32
"""So many values more than the data set should have are no classes that somebody forgot to name."""

Found = tuple[dict[str, list[Finding]], list[Finding]]


def label_rows(cases: Sequence[CaseCheck], labels: Mapping[str, int]) -> tuple[LabelRow, ...]:
    """Returns voxels and cases of every label value, named or found, by value."""
    voxels: Counter[int] = Counter()
    present: Counter[int] = Counter()
    for case in cases:
        if case.label is not None:
            voxels.update(case.label.voxels)
            present.update(case.label.voxels.keys())
    names = {value: name for name, value in labels.items()}
    return tuple(
        LabelRow(value=value, name=names.get(value), voxels=voxels[value], cases=present[value])
        for value in sorted(voxels.keys() | names.keys())
    )


def suggest_remap(found: set[int], named: set[int]) -> dict[int, int]:
    """Returns {value: value} that would turn `found` values into `named` ones (or, unnamed, into 0, 1, 2, ...).

    Empty where nothing suggests itself: values that are not named are matched, in order, with named ones that occur
    nowhere, if there are as many of them.
    """
    if not named:
        ordered = sorted(found | {0})
        return {value: rank for rank, value in enumerate(ordered) if value != rank}
    surplus, missing = sorted(found - named), sorted(named - found - {0})
    return dict(zip(surplus, missing, strict=True)) if len(surplus) == len(missing) else {}


def label_findings(cases: Sequence[CaseCheck], labels: Mapping[str, int], most_values: int) -> Found:
    """Returns the findings on label values, by case and of the data set."""
    labelled = [case for case in cases if case.label is not None]
    by_case: dict[str, list[Finding]] = {}
    usual = float(np.median([case.label.distinct for case in labelled if case.label])) if labelled else 0.0
    named = set(labels.values())
    sane: set[int] = set()
    for case in labelled:
        assert case.label is not None
        surplus = len(set(case.label.voxels) - named) if named else case.label.distinct - int(usual)
        if case.label.distinct > most_values:
            continue  # said already
        if surplus > MANY_VALUES:
            beside = (
                f"of which dataset.json lists {case.label.distinct - surplus}" if named else f"{usual:g} are usual here"
            )
            why = f"holds {case.label.distinct} different values, {beside}"
            by_case[case.name] = [_too_many(why)]
        else:
            sane |= set(case.label.voxels)
    whole: list[Finding] = []
    remap = suggest_remap(sane, named)
    if named:
        for case in labelled:
            assert case.label is not None
            unknown = sorted(set(case.label.voxels) - named)
            if unknown and case.name not in by_case and case.label.distinct <= most_values:
                by_case[case.name] = [_unknown(unknown, case, {k: v for k, v in remap.items() if k in unknown})]
        found = {value for case in labelled if case.label for value in case.label.voxels}
        whole += _never(labels, sane) + _gap(named, "dataset.json names", closable=found <= named)
    elif sane:
        whole += _gap(sane | {0}, "the label maps hold")
    if labelled and not sane - {0} and not by_case:
        text = "every label map is empty (0 everywhere): there is nothing to learn from. Are these the right files?"
        whole.append(Finding(code="all-empty", severity="fail", text=text))
    return by_case, whole


def remap_words(remap: Mapping[int, int]) -> str | None:
    """Returns the words of the command line that apply a remap."""
    return f"fix=labels remap={{{','.join(f'{a}:{b}' for a, b in remap.items())}}}" if remap else None


def _unknown(unknown: list[int], case: CaseCheck, remap: Mapping[int, int]) -> Finding:
    assert case.label is not None
    shown = listing([f"{value} ({case.label.voxels[value]} voxels)" for value in unknown])
    text = f"label values that dataset.json does not list: {shown}. Add them to it, or correct the label map."
    return Finding(code="unknown-label", severity="fail", text=text, fix=remap_words(remap))


def _never(labels: Mapping[str, int], found: set[int]) -> list[Finding]:
    absent = [f"{name} ({value})" for name, value in labels.items() if value and value not in found]
    if not absent or not found - {0}:
        return []
    text = f"classes that occur in no label map: {listing(absent)}. A network cannot learn them."
    return [Finding(code="absent-label", severity="warn", text=text)]


def _too_many(why: str) -> Finding:
    text = (
        f"the label map {why}. Are intensities stored as labels, or the classes of another data set? Put the right "
        "segmentation in its place, or list its values in dataset.json."
    )
    return Finding(code="intensities", severity="fail", text=text)


def _gap(values: set[int], who: str, *, closable: bool = True) -> list[Finding]:
    """`closable`: no label map holds a value that closing the gaps would merge with another."""
    ordered = sorted(values)
    if ordered == list(range(len(ordered))):
        return []
    text = (
        f"gaps in the label values: {who} {listing(ordered, 20)}. medckpt counts classes by rank and needs no "
        "change; nnU-Net asks for 0, 1, 2, ..."
    )
    remap = suggest_remap(values, set()) if closable else {}
    return [Finding(code="label-gap", severity="warn", text=text, fix=remap_words(remap))]
