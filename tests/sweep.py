"""Makes the README's support table of what ``nox -s sweep`` left: one JUnit file per release.

``python sweep.py FOLDER DESCRIPTION``
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from packaging.version import Version

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- sweep: nox -s sweep -->\n", "<!-- end of sweep -->"

CELLS = ["stage 0", "stage 1", "stage 2", "stage 3"]
CELLS += [f"stage {stage} + offload" for stage in (1, 2, 3)] + ["stage 3 + NVMe"]
OTHER = "patches, refusals"


@dataclass
class Cell:
    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.failed:
            more = f" and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
            return f"**fails**: {self.failed[0]}{more}"
        if self.passed:
            return f"{self.passed}"
        return "-"


def read(path: Path) -> tuple[dict[str, Cell], dict[str, int]]:
    """The cells of one release, and how often it skipped a test for which reason."""
    cells: dict[str, Cell] = defaultdict(Cell)
    reasons: dict[str, int] = defaultdict(int)
    for case in ET.parse(path).iter("testcase"):
        names = {p.get("value") for p in case.iter("property") if p.get("name") == "cell"}
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        if skipped is not None:
            reasons[skipped.get("message", "")] += 1
        for name in names or {OTHER}:
            cell = cells[name or OTHER]
            if failed:
                cell.failed.append(case.get("name", "?"))
            elif skipped is None:
                cell.passed += 1
    return cells, reasons


def table(folder: Path, description: str) -> str:
    paths = sorted(folder.glob("*.xml"), key=lambda path: Version(path.stem))
    columns = [*CELLS, OTHER]
    rows = [f"| DeepSpeed | {' | '.join(columns)} | skipped |", "|---" * (len(columns) + 2) + "|"]
    releases_by_reason: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        cells, reasons = read(path)
        texts = [str(cells[name]) if name in cells else "-" for name in columns]
        rows.append(f"| {path.stem} | {' | '.join(texts)} | {sum(reasons.values())} |")
        for reason in reasons:
            general = re.sub(r"^DeepSpeed [0-9.]+ ", "DeepSpeed ", reason)
            releases_by_reason[general].append(path.stem)
    notes = [
        f"* {reason}: {spans(releases, [path.stem for path in paths])}"
        for reason, releases in sorted(releases_by_reason.items())
    ]
    return "\n".join([description, "", *rows, "", "Why tests were skipped:", "", *notes, ""])


def spans(releases: list[str], every: list[str]) -> str:
    """ "0.15.0-0.15.2, 0.16.0" for consecutive releases."""
    runs: list[list[str]] = []
    for release in every:
        if release not in releases:
            continue
        if runs and every.index(runs[-1][-1]) + 1 == every.index(release):
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


if __name__ == "__main__":
    text = table(Path(sys.argv[1]), sys.argv[2])
    print(text)
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
