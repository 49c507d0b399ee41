"""Tables and a chart of what run.py measured: ``python report.py RESULTS.json``.

From bench.json beside this file it writes bench.md and bench.png, and the README between its
markers; any other file is printed only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- bench: nox -s bench -->\n", "<!-- end of bench -->"

Row = dict[str, Any]
Results = dict[str, dict[str, list[Row]]]

COUNTED = ("collectives", "collective bytes", "copies", "copied bytes", "live bytes")
LIMITS = {"50 M": 1.02, "10,000 tiny": 1.05}
"""Ratios of times above these are worth a look."""


def where(row: Row) -> str:
    clipped = ", clipping" if row.get("clip") else ""
    return f"stage {row['stage']}{' + offload' if row['offload'] else ''}{clipped}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    cells = [list(head)]
    lines = [f"| {' | '.join(row)} |" for row in [*cells, *map(list, rows)]]
    return [lines[0], "|---" * len(cells[0]) + "|", *lines[1:], ""]


def mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f}"


def excesses(results: Results) -> list[str]:
    """Every count in which a window costs more than in a stock mode of the same release."""
    found = []
    for release, parts in results.items():
        rows = parts.get("costs", [])
        ours = {(where(r), r["n"]): r for r in rows if r["mode"] == "unmanaged"}
        for row in rows:
            if row["mode"].startswith("unmanaged"):
                continue
            mine = ours[where(row), row["n"]]
            found += [
                f"{release} {where(row)}, N = {row['n']}: {key} {mine[key]} against {row[key]} in "
                f"{row['mode']} mode"
                for key in COUNTED
                if mine[key] > row[key]
            ]
    return found


def costs_table(rows: list[Row]) -> list[str]:
    head = ["configuration", "N", "mode", "collectives", "MiB", "copies", "MiB"]
    keys = ("copied bytes", "live bytes", "peak bytes")
    return table(
        [*head, "kept, MiB", "peak, MiB"],
        (
            [
                where(row),
                str(row["n"]),
                row["mode"],
                str(row["collectives"]),
                mebibytes(row["collective bytes"]),
                str(row["copies"]),
                *(mebibytes(row[key]) for key in keys),
            ]
            for row in rows
        ),
    )


def ratios_table(results: Results) -> list[str]:
    """A line for whatever was measured on any release, so that what is missing shows."""
    every = [row for parts in results.values() for row in parts.get("ratios", [])]
    cells = dict.fromkeys((row["stage"], row["offload"], row.get("clip")) for row in every)
    counts = sorted({row["n"] for row in every})
    lines = []
    for release, parts in results.items():
        rows = parts.get("ratios", [])
        for model in dict.fromkeys(row["model"] for row in every):
            for cell in cells:
                for stock in dict.fromkeys(row["stock"] for row in rows):
                    texts = dict.fromkeys(counts, "not measured")
                    for row in rows:
                        place = (row["stage"], row["offload"], row.get("clip"))
                        if (row["model"], place, row["stock"]) == (model, cell, stock):
                            quartiles = f"{row['low']:.2f}-{row['high']:.2f}"
                            texts[row["n"]] = f"{row['median']:.2f} ({quartiles})"
                    stage, offload, clip = cell
                    name = where({"stage": stage, "offload": offload, "clip": clip})
                    lines.append([release, model, name, stock, *texts.values()])
    head = ["DeepSpeed", "model", "configuration", "against", *(f"N = {n}" for n in counts)]
    return table(head, lines)


def worst_table(results: Results) -> list[str]:
    """For each release, model and stock mode: the median over configurations, and the worst."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for release, parts in results.items():
        for row in parts.get("ratios", []):
            groups.setdefault((release, row["model"], row["stock"]), []).append(row)
    lines = []
    for key, rows in groups.items():
        rows.sort(key=lambda row: row["median"])
        best, worst = rows[0], rows[-1]
        limit = LIMITS.get(key[1], 1.0)
        above = [row for row in rows if row["median"] > limit]
        line = [*key, str(len(rows)), f"{rows[len(rows) // 2]['median']:.2f}"]
        line += [f"{r['median']:.2f} ({where(r)}, N = {r['n']})" for r in (best, worst)]
        lines.append([*line, str(len(above))])
    head = ["DeepSpeed", "model", "against", "cells", "median", "best", "worst", "above the limit"]
    return table(head, lines)


def growth_table(results: Results) -> list[str]:
    """The plugin's own time in one call, in microseconds per parameter."""
    every = [row for parts in results.values() for row in parts.get("growth", [])]
    if not every:
        return []
    nums = sorted({row["num"] for row in every})
    counts = sorted({row["n"] for row in every})
    points = [(num, counts[0]) for num in nums] + [(nums[-2], n) for n in counts[1:]]
    lines = []
    for release, parts in results.items():
        rows = parts.get("growth", [])
        for cell in dict.fromkeys((row["ranks"], where(row)) for row in rows):
            found = {(r["num"], r["n"]): r for r in rows if (r["ranks"], where(r)) == cell}
            for call in ("backward", "step"):
                times = [
                    f"{1e6 * found[point][call] / point[0]:.2f}" if point in found else ""
                    for point in points
                ]
                lines.append([release, *map(str, cell), f"{call}()", *times])
    head = ["DeepSpeed", "ranks", "configuration", "call"]
    return table([*head, *(f"{num} parameters, N = {n}" for num, n in points)], lines)


def overhead_table(results: Results) -> list[str]:
    head = ["DeepSpeed", "configuration", "backward()", "step()"]
    return table(
        head,
        (
            [release, where(row), *(f"{row[key]:.1f} us" for key in ("backward", "step"))]
            for release, parts in results.items()
            for row in parts.get("overhead", [])
        ),
    )


def chart(results: Results, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = [
        row | {"release": release}
        for release, parts in results.items()
        for row in parts.get("ratios", [])
    ]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        len(models), 1, figsize=(9, 3.5 * len(models)), squeeze=False, sharex=True
    )
    places = list(dict.fromkeys(where(row) for row in rows))
    counts = sorted({row["n"] for row in rows})
    against = list(dict.fromkeys((row["release"], row["stock"]) for row in rows))
    num_places = len(counts) * len(against)
    for (axes,), model in zip(panels, models):
        for place, (release, stock) in enumerate(against):
            for shift, n in enumerate(counts):
                same = [
                    row
                    for row in rows
                    if (row["model"], row["n"]) == (model, n)
                    and (row["release"], row["stock"]) == (release, stock)
                ]
                offset = (place * len(counts) + shift - num_places / 2) * 0.8 / num_places
                axes.errorbar(
                    [places.index(where(row)) + offset for row in same],
                    [row["median"] for row in same],
                    yerr=[
                        [row["median"] - row["low"] for row in same],
                        [row["high"] - row["median"] for row in same],
                    ],
                    fmt="osd^vx"[place],
                    color=f"C{shift}",
                    markersize=3,
                    linewidth=0.7,
                    label=f"{release}, {stock}, N = {n}",
                )
        axes.axhline(1.0, color="grey", linewidth=1)
        axes.set_title(f"model: {model} parameters", fontsize=9)
        axes.set_ylabel("time of a window / stock's", fontsize=8)
        axes.set_xticks(range(len(places)), places, fontsize=8)
    handles = panels[0][0].get_legend_handles_labels()
    figure.legend(*handles, fontsize=6, ncol=len(against), loc="lower center")
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=120)


def main() -> None:
    path = Path(sys.argv[1])
    results: Results = json.loads(path.read_text())
    newest = next(iter(results))
    more = excesses(results)
    verdict = [f"Counts above those of a stock mode: {len(more)}.", *(f"- {m}" for m in more), ""]
    everything = ["# What a window costs: all measurements", "", *ratios_table(results)]
    everything += [*overhead_table(results), *growth_table(results), *verdict]
    for release, parts in results.items():
        everything += [f"Costs on {release}:", "", *costs_table(parts.get("costs", []))]
    print(*everything, sep="\n")
    if path.resolve() != FOLDER / "bench.json":
        return
    (FOLDER / "bench.md").write_text("\n".join(everything).rstrip() + "\n")
    chart(results, FOLDER / "bench.png")
    at_four = [row for row in results[newest]["costs"] if row["n"] == 4]
    summary = ["![ratios of times](tests/bench/bench.png)", "", *worst_table(results)]
    summary += [*verdict, f"One window of 4 backwards on {newest}:", "", *costs_table(at_four)]
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text("\n".join([f"{before}{BEGIN}", *summary, f"{END}{after}"]))


if __name__ == "__main__":
    main()
