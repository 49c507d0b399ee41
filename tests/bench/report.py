"""The README's tables and chart from what run.py measured: ``python report.py RESULT.json...``.

Writes bench.json and bench.png beside this file, and the README between its markers; what was
measured with --quick is printed only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
README = FOLDER.parents[1] / "README.md"
BEGIN, END = "<!-- bench: nox -s bench -->\n", "<!-- end of bench -->"


def where(row: dict[str, Any]) -> str:
    return f"stage {row['stage']}{' + offload' if row['offload'] else ''}"


def total(row: dict[str, Any], key: str) -> int:
    """Over both ranks, and over kinds where there are several."""
    values = [rank[key] for rank in row["ranks"]]
    return sum(sum(v.values()) if isinstance(v, dict) else v for v in values)


def excesses(results: list[dict[str, Any]]) -> list[str]:
    """Every count in which a window costs more than in a stock mode of the same release."""
    found = []
    for result in results:
        rows = result["2 ranks"]["costs"]
        ours = {(where(r), r["n"]): r for r in rows if r["mode"] == "unmanaged"}
        for row in rows:
            if row["mode"].startswith("unmanaged"):
                continue
            mine = ours[where(row), row["n"]]
            for key in ("collectives", "collective bytes", "copies", "copied bytes", "live bytes"):
                if total(mine, key) > total(row, key):
                    text = f"{result['deepspeed']} {where(row)}, N = {row['n']}: {key} "
                    found.append(
                        text + f"{total(mine, key)} against {total(row, key)} {row['mode']}"
                    )
    return found


def costs_table(result: dict[str, Any]) -> list[str]:
    rows = result["2 ranks"]["costs"]
    lines = [
        "| configuration | N | mode | collectives | MiB | copies | MiB | kept, MiB | peak, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [where(row), str(row["n"]), row["mode"], str(total(row, "collectives"))]
        cells += [mebibytes(total(row, "collective bytes")), str(total(row, "copies"))]
        keys = ("copied bytes", "live bytes", "peak bytes")
        cells += [mebibytes(total(row, key)) for key in keys]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mebibytes(number: int) -> str:
    return f"{number / 2**20:.1f}"


def ratios_table(results: list[dict[str, Any]]) -> list[str]:
    rows = [row | {"deepspeed": r["deepspeed"]} for r in results for row in r["2 ranks"]["ratios"]]
    counts = sorted({row["n"] for row in rows})
    lines = [
        f"| release | model | configuration | against | {' | '.join(f'N = {n}' for n in counts)} |"
    ]
    lines.append("|---" * (4 + len(counts)) + "|")
    keys = ("deepspeed", "model", "stage", "offload", "stock")
    for key in dict.fromkeys(tuple(row[k] for k in keys) for row in rows):
        same = {row["n"]: row for row in rows if tuple(row[k] for k in keys) == key}
        cells = [
            f"{same[n]['median']:.3f} ({same[n]['low']:.3f}-{same[n]['high']:.3f})" for n in counts
        ]
        first = next(iter(same.values()))
        head = [first["deepspeed"], first["model"], where(first), first["stock"]]
        lines.append(f"| {' | '.join(head + cells)} |")
    return lines


def growth_table(results: list[dict[str, Any]]) -> list[str]:
    """The plugin's own time, in microseconds per parameter: the slope between the fewest and the
    most parameters."""
    lines = [
        "| DeepSpeed | ranks | configuration | N | us per parameter in backward() | in step() |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for world in (key for key in result if key.endswith("ranks")):
            rows = result[world]["growth"]
            for cell in dict.fromkeys((where(row), row["n"]) for row in rows):
                same = sorted(
                    (r for r in rows if (where(r), r["n"]) == cell), key=lambda r: r["num"]
                )
                few, many = same[0], same[-1]
                slopes = [
                    f"{1e6 * (many[k] - few[k]) / (many['num'] - few['num']):.2f}"
                    for k in ("backward", "step")
                ]
                head = [result["deepspeed"], world.split()[0], cell[0], str(cell[1])]
                lines.append(f"| {' | '.join(head + slopes)} |")
    return lines


def overhead_table(results: list[dict[str, Any]]) -> list[str]:
    lines = ["| DeepSpeed | configuration | backward() | step() |", "|---|---|---|---|"]
    for result in results:
        for row in result["2 ranks"]["overhead"]:
            cells = [result["deepspeed"], where(row)]
            cells += [f"{row[k]:.1f} us" for k in ("backward", "step")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def chart(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    rows = [row | {"deepspeed": r["deepspeed"]} for r in results for row in r["2 ranks"]["ratios"]]
    rows.reverse()
    labels = [
        f"{r['deepspeed']} {r['model']}, {where(r)}, N = {r['n']}, {r['stock']}" for r in rows
    ]
    figure, axes = plt.subplots(figsize=(9, 1 + 0.16 * len(rows)))
    middles = [row["median"] for row in rows]
    errors = [
        [row["median"] - row["low"] for row in rows],
        [row["high"] - row["median"] for row in rows],
    ]
    axes.errorbar(middles, range(len(rows)), xerr=errors, fmt="o", markersize=3, linewidth=1)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), labels, fontsize=5)
    axes.set_xlabel("time of an unmanaged window / of a stock one: median and quartiles of pairs")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    results = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    more = excesses(results)
    lines = ["![time ratios](tests/bench/bench.png)", "", *ratios_table(results), ""]
    lines += [*overhead_table(results), "", *growth_table(results), ""]
    lines += costs_table(results[0])
    text = "\n".join(lines)
    print(text)
    print(f"counts above a stock mode's: {len(more)}", *more, sep="\n  ")
    if any(result["quick"] for result in results):
        return
    (FOLDER / "bench.json").write_text(json.dumps(results, indent=1))
    chart(results, FOLDER / "bench.png")
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
