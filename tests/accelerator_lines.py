"""Which lines of the package that have to do with an accelerator did the tests on the double run?

``python accelerator_lines.py FOLDER`` reads what ranks on the double have left there (see
harness/worker.py), prints the lines that none of them reached, and ends with 1 if there are any.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage

PACKAGE = Path(__file__).parents[1] / "ds_unmanaged_gas"

NAMES = {
    *("current_stream", "stream", "synchronize", "wait_stream", "record_stream", "Event", "query"),
    *("is_synchronized_device", "resolves_data_dependency", "pin_memory", "is_fp64_supported"),
    *("order", "keep_alive", "copying", "wait_for_copies", "_on_stream"),
}
"""A statement that says one of these has to do with streams, or with memory that a copy may be late
in; so has what it surrounds."""

ON_CPUS_ONLY = "is_synchronized_device"


def lines_of(source: str) -> dict[int, str]:
    """The lines of functions that have to do with an accelerator, by number, with the function."""
    found = {}
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef):
            for line in _lines(function.body, inside=False):
                found.setdefault(line, function.name)
    return found


def _lines(body: list[ast.stmt], *, inside: bool) -> Iterator[int]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            continue
        blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
        if isinstance(statement, ast.Try):
            blocks += [handler.body for handler in statement.handlers]
        header = [
            each
            for name, value in ast.iter_fields(statement)
            if name not in ("body", "orelse", "finalbody", "handlers")
            for each in (value if isinstance(value, list) else [value])
            if isinstance(each, ast.AST)
        ]
        names = {name for each in header for name in _names_in(each)}
        is_one = inside or bool(NAMES & names)
        if is_one:
            yield statement.lineno
        is_negated = isinstance(statement, ast.If) and isinstance(statement.test, ast.UnaryOp)
        if isinstance(statement, ast.If) and ON_CPUS_ONLY in names and not is_negated:
            blocks = blocks[1:]
        for block in blocks:
            yield from _lines(block, inside=is_one)


def _names_in(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            yield each.id
        elif isinstance(each, ast.Attribute):
            yield each.attr


def main(folder: str) -> int:
    data = coverage.CoverageData(no_disk=True)
    files = list(Path(folder).iterdir())
    for file in files:
        part = coverage.CoverageData(basename=str(file))
        part.read()
        data.update(part)
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        ran = set(data.lines(str(path)) or [])
        wanted = lines_of(path.read_text())
        missing += [f"{path.name}:{n} in {wanted[n]}" for n in sorted(set(wanted) - ran)]
    print(f"{len(files)} ranks on the double; accelerator lines that none of them ran:")
    print("\n".join(missing) or "none")
    return 1 if missing or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
