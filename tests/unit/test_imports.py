"""The direction of imports inside the package, which keeps each module readable on its own."""

from __future__ import annotations

import ast
from pathlib import Path

import ds_unmanaged_gas

PACKAGE = Path(ds_unmanaged_gas.__file__).parent

MAY_IMPORT = {
    "__init__": {"accumulation", "errors", "installer", "window"},
    "__main__": {"", "compat", "explain"},  # "" is the package itself
    "accumulation": {"config", "errors", "window"},
    "compat": {"errors"},
    "config": {"errors"},
    "engine": {
        "compat",
        "config",
        "errors",
        "gradients",
        "inspection",
        "patching",
        "stage1_2",
        "stage3",
        "window",
    },
    "errors": set(),
    "explain": {"", "config", "errors"},
    "fingerprints": {"compat", "patching"},
    "gradients": {"errors", "patching", "window"},
    "inspection": {"errors", "patching", "window"},
    "offload": set(),
    "installer": {"compat", "engine", "errors", "fingerprints", "patching", "window"},
    "patching": {"errors"},
    "stage1_2": {"compat", "gradients", "offload", "patching", "window"},
    "stage3": {"compat", "gradients", "offload", "patching", "window"},
    "window": {"errors"},
}

NEEDS_DEEPSPEED = {"engine", "gradients", "inspection", "offload", "stage1_2", "stage3"}


def relative_imports(module: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                found.add(node.module)
            else:
                names = {alias.name for alias in node.names}
                found |= {name if (PACKAGE / f"{name}.py").exists() else "" for name in names}
    return found


def top_level_imports(module: str) -> set[str]:
    found = set()
    for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_modules_import_in_one_direction() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == set(MAY_IMPORT)
    for module in modules:
        assert relative_imports(module) <= MAY_IMPORT[module], module


def test_torch_and_deepspeed_are_imported_where_engines_are_handled_only() -> None:
    for path in PACKAGE.glob("*.py"):
        imports = top_level_imports(path.stem) & {"torch", "deepspeed"}
        assert not imports or path.stem in NEEDS_DEEPSPEED, path.stem


def comparisons_of_versions(module: str) -> list[str]:
    """Imports of a version parser, and comparisons of anything called a version."""
    found = []
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and "packaging" in ast.unparse(node):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Compare) and "version" in ast.unparse(node).lower():
            found.append(ast.unparse(node))
    return found


def test_versions_are_compared_in_compat_only() -> None:
    assert comparisons_of_versions("compat")  # or this test could not fail
    for path in PACKAGE.glob("*.py"):
        if path.stem != "compat":
            assert comparisons_of_versions(path.stem) == [], path.stem
