"""Makes the README's support table of what ``nox -s sweep`` left: one JUnit file per release.

``python sweep.py VERSIONS FILE...`` adds the files to sweep.json, so that a sweep may be run in
parts, and makes the table of all that it has.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from packaging.version import Version

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- sweep: nox -s sweep -->\n", "<!-- end of sweep -->"

DATA = Path(__file__).with_name("sweep.json")

CELLS = ["stage 0", "stage 1", "stage 2", "stage 3"]
CELLS += [f"stage {stage} + offload" for stage in (1, 2, 3)] + ["stage 3 + NVMe"]
OTHER = "patches, refusals"

Release = dict[str, Any]
"""When and with what it was tested; by cell how many tests passed and which failed; how many were
skipped for which reason."""


def read(path: Path, versions: str) -> Release:
    suite = ET.parse(path).getroot()[0]
    passed: dict[str, int] = defaultdict(int)
    failed: dict[str, list[str]] = defaultdict(list)
    skipped: dict[str, int] = defaultdict(int)
    for case in suite.iter("testcase"):
        names = {p.get("value") for p in case.iter("property") if p.get("name") == "cell"}
        reason = case.find("skipped")
        if reason is not None:
            skipped[reason.get("message", "")] += 1
            continue
        for name in names or {OTHER}:
            if case.find("failure") is not None or case.find("error") is not None:
                failed[name or OTHER].append(case.get("name", "?"))
            else:
                passed[name or OTHER] += 1
    date = suite.get("timestamp", "")[:10]
    return {"date": date, "with": versions, "passed": passed, "failed": failed, "skipped": skipped}


def text_of(release: Release, cell: str) -> str:
    if failed := release["failed"].get(cell):
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"**fails**: {failed[0]}{more}"
    return str(release["passed"].get(cell, "-"))


def table(releases: dict[str, Release]) -> str:
    columns = [*CELLS, OTHER]
    rows = [f"| DeepSpeed | {' | '.join(columns)} | skipped | on |"]
    rows.append("|---" * (len(columns) + 3) + "|")
    releases_by_reason: dict[str, list[str]] = defaultdict(list)
    for name, release in releases.items():
        texts = [text_of(release, cell) for cell in columns]
        texts += [str(sum(release["skipped"].values())), release["date"]]
        rows.append(f"| {name} | {' | '.join(texts)} |")
        for reason in release["skipped"]:
            general = re.sub(r"\bDeepSpeed [0-9.]+ ", "DeepSpeed ", reason)
            releases_by_reason[general].append(name)
    notes = [
        f"* {reason}: {spans(names, list(releases))}"
        for reason, names in sorted(releases_by_reason.items())
    ]
    versions = "; ".join(dict.fromkeys(release["with"] for release in releases.values()))
    description = f"Number of tests that passed, with {versions}."
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


def main(versions: str, paths: list[Path]) -> None:
    releases: dict[str, Release] = json.loads(DATA.read_text()) if DATA.exists() else {}
    releases |= {path.stem: read(path, versions) for path in paths}
    releases = {name: releases[name] for name in sorted(releases, key=Version)}
    DATA.write_text(json.dumps(releases, indent=1) + "\n")
    text = table(releases)
    print(text)
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1], [Path(name) for name in sys.argv[2:]])
