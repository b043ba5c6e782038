"""The page and the picture of `forecast.py`."""

from __future__ import annotations

import statistics
from datetime import date
from pathlib import Path
from typing import Any


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures by which a forecast is judged."""
    errors = {row["name"]: abs(row["error_percent"]) for row in rows}
    worst = max(errors, key=errors.__getitem__)
    beyond = [abs(beyond_weights(row)) for row in rows]
    return {
        "combinations": len(rows),
        "median_abs_error_percent": round(statistics.median(errors.values()), 4),
        "worst_abs_error_percent": errors[worst],
        "worst": worst,
        "median_abs_error_beyond_weights_percent": round(statistics.median(beyond), 4),
        "worst_abs_error_beyond_weights_percent": round(max(beyond), 4),
        "within_1_percent": sum(error <= 1 for error in errors.values()),
        "forecast_seconds_median": round(statistics.median(row["forecast_seconds"] for row in rows), 2),
    }


def beyond_weights(row: dict[str, Any]) -> float:
    """Returns the error as a percentage of what is not weights and moments, which any forecast gets right."""
    return float(
        100 * (row["predicted_bytes"] - row["measured_bytes"]) / (row["measured_bytes"] - 12 * row["parameters"])
    )


def markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Returns the table with its summary."""
    total = summary(rows)
    lines = [
        "# Forecast against measurement on a CPU",
        "",
        f"{date.today().isoformat()}, {facts['cpu']}, {facts['threads']} of {facts['cores']} cores, torch "
        f"{facts['torch']}, MONAI {facts['monai']}. Written by `python benchmarks/forecast.py`; everything in it is "
        "measured there.",
        "",
        f"**{total['combinations']} combinations: median |error| {total['median_abs_error_percent']:.3f} %, worst "
        f"{total['worst_abs_error_percent']:.2f} %** ({total['worst']}); {total['within_1_percent']} within 1 %. "
        "Of the memory beyond weights and AdamW's moments (12 bytes per parameter, which any forecast gets right) the "
        f"median error is {total['median_abs_error_beyond_weights_percent']:.3f} % and the worst "
        f"{total['worst_abs_error_beyond_weights_percent']:.2f} %. "
        f"A forecast took {total['forecast_seconds_median']:.1f} s (median), the measuring of scratch memory included.",
        "",
        "The peak of one training step (forward, loss, backward, clipping, AdamW) with all that is held before it. "
        "Measured: the allocator events of torch's profiler over one real step. Patches per step is the batch. "
        "MaskedAutoEncoderViT is in float32 only: under bf16 autocast MONAI's own `index_put` of it fails.",
        "",
        "| network | patch | batch | precision | policy | loss | parameters (M) | predicted (MiB) | measured (MiB) "
        "| error (%) | beyond weights (%) | forecast (s) |",
        "|---|---|--:|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['net']} | {'x'.join(map(str, row['patch']))} | {row['batch']} | {row['precision']} "
        f"| {row['policy'] or 'plain'} | {row['loss']} | {row['parameters'] / 1e6:.1f} "
        f"| {row['predicted_bytes'] / 2**20:.2f} | {row['measured_bytes'] / 2**20:.2f} "
        f"| {row['error_percent']:+.3f} | {beyond_weights(row):+.3f} | {row['forecast_seconds']:.1f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws predicted over measured and the distribution of errors as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    families = list(dict.fromkeys(row["net"] for row in rows))
    for number, family in enumerate(families):
        for policy, marker in ((None, "o"), ("all", "^")):
            chosen = [row for row in rows if row["net"] == family and row["policy"] == policy]
            left.scatter(
                [row["measured_bytes"] / 2**20 for row in chosen],
                [row["predicted_bytes"] / 2**20 for row in chosen],
                marker=marker,
                s=26,
                color=f"C{number}",
                alpha=0.75,
                label=family if policy is None else None,
            )
    sizes = [row["measured_bytes"] / 2**20 for row in rows]
    span = (min(sizes) / 1.3, max(sizes) * 1.3)
    left.plot(span, span, color="0.4", linewidth=0.8, zorder=0)
    left.set(xscale="log", yscale="log", xlim=span, ylim=span)
    left.set(
        xlabel="measured peak (MiB)", ylabel="predicted peak (MiB)", title="circles: plain; triangles: all recomputed"
    )
    left.legend(fontsize=8, frameon=False)
    errors = [row["error_percent"] for row in rows]
    right.hist(errors, bins=31, color="C0")
    total = summary(rows)
    median, worst = total["median_abs_error_percent"], total["worst_abs_error_percent"]
    right.set(xlabel="error of the forecast (% of measured)", ylabel="combinations")
    right.set_title(f"{len(rows)} combinations: median |error| {median:.3f} %, worst {worst:.2f} %", fontsize=10)
    figure.savefig(path)
