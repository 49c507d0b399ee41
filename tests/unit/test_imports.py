"""The direction of imports inside the package, which keeps each module readable on its own."""

from __future__ import annotations

import ast
from pathlib import Path

import ds_unmanaged_gas

PACKAGE = Path(ds_unmanaged_gas.__file__).parent

# Module name, of a subpackage the folder's -> file.
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path
    for path in PACKAGE.rglob("*.py")
}

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
        "unmanaged",
        "window",
    },
    "errors": set(),
    "explain": {"", "config", "errors"},
    "fingerprints": {"compat", "patching"},
    "gradients": {"errors", "offload", "patching", "window"},
    "inspection": {"errors", "patching", "window"},
    "offload": set(),
    "installer": {
        "compat",
        "engine",
        "errors",
        "fingerprints",
        "integrations",
        "patching",
        "window",
    },
    "integrations": {
        "integrations/accelerate",
        "integrations/lightning",
        "integrations/tiled_compute",
        "patching",
    },
    "integrations/accelerate": {"config", "errors", "patching", "window"},
    "integrations/lightning": {"errors", "patching", "window"},
    "integrations/tiled_compute": {"engine", "errors", "patching"},
    "patching": {"errors"},
    "stage1_2": {"compat", "gradients", "offload", "patching", "window"},
    "stage3": {"compat", "gradients", "offload", "patching", "window"},
    "unmanaged": {"compat", "config", "errors", "gradients", "stage1_2", "stage3", "window"},
    "window": {"errors"},
}

NEEDS_DEEPSPEED = {
    "engine",
    "gradients",
    "inspection",
    "offload",
    "stage1_2",
    "stage3",
    "unmanaged",
}


def internal_imports(module: str) -> set[str]:
    found = set()
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = path.parents[node.level - 1].relative_to(PACKAGE)
            if node.module:
                found.add((folder / node.module).as_posix())
            else:
                names = {(folder / alias.name).as_posix() for alias in node.names}
                found |= {name if name in MODULES else "" for name in names}
        elif isinstance(node, ast.ImportFrom) and node.module == "ds_unmanaged_gas":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("ds_unmanaged_gas."):
            found.add(str(node.module).removeprefix("ds_unmanaged_gas."))
    return found


def top_level_imports(module: str) -> set[str]:
    found = set()
    for node in ast.parse(MODULES[module].read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_modules_import_in_one_direction() -> None:
    assert set(MODULES) == set(MAY_IMPORT)
    for module in MODULES:
        assert internal_imports(module) <= MAY_IMPORT[module], module


def test_torch_and_deepspeed_are_imported_where_engines_are_handled_only() -> None:
    for module in MODULES:
        imports = top_level_imports(module) & {"torch", "deepspeed"}
        assert not imports or module in NEEDS_DEEPSPEED, module


def test_no_library_is_imported_for_its_integration() -> None:
    for module in MODULES:
        assert not top_level_imports(module) & {"accelerate", "lightning", "transformers"}, module


def comparisons_of_versions(module: str) -> list[str]:
    """Imports of a version parser, and comparisons of anything called a version."""
    found = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom) and "packaging" in ast.unparse(node):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Compare) and "version" in ast.unparse(node).lower():
            found.append(ast.unparse(node))
    return found


def test_versions_are_compared_in_compat_only() -> None:
    assert comparisons_of_versions("compat")  # or this test could not fail
    for module in MODULES:
        if module != "compat":
            assert comparisons_of_versions(module) == [], module
