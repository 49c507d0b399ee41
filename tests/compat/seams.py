"""What enable() wraps and counts on, recorded on each release. Run by ``nox -s fingerprints``.

``python seams.py record FILE`` writes what the installed DeepSpeed has; ``python seams.py merge
FILE...`` makes ds_unmanaged_gas/fingerprints.json and the README's table of them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from ds_unmanaged_gas.compat import ERAS

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- seams: nox -s fingerprints -->\n", "<!-- end of seams -->"


def record(path: Path) -> None:
    import deepspeed

    from ds_unmanaged_gas import engine, fingerprints
    from ds_unmanaged_gas.patching import full_name

    specs = engine.patches()
    record = {
        "release": deepspeed.__version__,
        "era": engine.ERA.first,
        "wrapped": {spec.target: spec.why for spec in specs},
        "fingerprints": {
            full_name(owner, name): fingerprints.of(vars(owner)[name])
            for owner, name in engine.methods(specs)
        },
    }
    path.write_text(json.dumps(record))


def fingerprints_of(records: list[dict[str, Any]]) -> str:
    known: dict[str, dict[str, list[str]]] = {}
    for each in records:
        for target, fingerprint in each["fingerprints"].items():
            known.setdefault(target, {}).setdefault(fingerprint, []).append(each["release"])
    text = json.dumps(known, indent=1, sort_keys=True)
    # One line per list of releases.
    return re.sub(r"\[\s+([^]]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def table_of(records: list[dict[str, Any]]) -> str:
    by_era = [[r for r in records if r["era"] == era.first] for era in ERAS]
    heads = [era.first if era.first == era.last else f"{era.first} - {era.last}" for era in ERAS]
    rows = [f"| wrapped | {' | '.join(heads)} | why |", "|---" * (len(ERAS) + 2) + "|"]
    whys: dict[str, str] = {}
    for each in records:
        whys |= each["wrapped"]
    for target, why in sorted(whys.items()):
        cells = []
        for of_era in by_era:
            having = [r["release"] for r in of_era if target in r["wrapped"]]
            everywhere = len(having) == len(of_era)
            some = "-".join(dict.fromkeys([having[0], having[-1]])) if having else ""
            cells.append("x" if everywhere else some)
        name = ".".join(target.split(".")[-2:])
        rows.append(f"| `{name}` | {' | '.join(cells)} | {why} |")
    traits = [f"* **{head}**: {era.trait}." for head, era in zip(heads, ERAS)]
    return "\n".join([*traits, "", *rows, ""])


def merge(paths: list[Path]) -> None:
    records = [json.loads(path.read_text()) for path in paths]
    data = ROOT / "ds_unmanaged_gas" / "fingerprints.json"
    data.write_text(fingerprints_of(records))
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{BEGIN}\n{table_of(records)}\n{END}{after}")


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "record":
        record(Path(arguments[0]))
    else:
        merge([Path(argument) for argument in arguments])
