"""Imports go down only: face 4 -> compiler 3 -> passes 2 -> costs 1 -> data 0, torch from 3 on."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "compiler": "meshfold",
    "passes": "meshfold.passes",
    "cost_models": "meshfold.cost_models",
}

DATA = {
    "meshfold",
    "meshfold.ir.cluster",
    "meshfold.plan_file.cluster_file",
    "meshfold.documents",
    "meshfold.errors",
    "meshfold.ir.node_groups",
    "meshfold.ir.bucketing",
    "meshfold.ir.mesh",
    "meshfold.ir.op_graph",
    "meshfold.ir.options",
    "meshfold.ir.plan",
    "meshfold.plan_file.io",
    "meshfold.plan_file.documents",
    "meshfold.plan_file.schema",
    "meshfold.plan_file.text",
    "meshfold.simulation_document",
    "meshfold.ir.spmd",
    "meshfold.ir.step_events",
    "meshfold.ir.strategy",
    "meshfold.units",
}
FACE_WITHOUT_TORCH = {"meshfold.cli.main", "meshfold.cli.command", "meshfold.report.plan"}
FACE = FACE_WITHOUT_TORCH | {"meshfold.cli.torch_commands"}


def modules() -> dict[str, Path]:
    found = {}
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            found[name] = path
    return found


MODULES = modules()


def layer(module: str) -> int:
    if module in DATA:
        return 0
    if module.startswith("meshfold.cost_models"):
        return 1
    if module.startswith("meshfold.passes"):
        return 2
    return 4 if module in FACE else 3


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere, type checking included: a type is a dependency too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from [s for s in submodules if s in MODULES] or [node.module]


def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def test_the_layer_map_names_existing_modules() -> None:
    assert sorted((DATA | FACE) - set(MODULES)) == []


# The package's __init__ is exempt: its imports of upper layers are lazy (PEP 562).
@pytest.mark.parametrize("module", sorted(set(MODULES) - {"meshfold"}))
def test_imports_go_down(module: str) -> None:
    used = [name for name in imports(parsed(module)) if name.split(".")[0] == "meshfold"]
    assert [u for u in used if layer(u) > layer(module)] == []
    if layer(module) < 3 or module in FACE_WITHOUT_TORCH:
        outside = {name.split(".")[0] for name in imports(parsed(module))}
        assert not outside & {"torch", "transformers"}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_import_inside_a_function(module: str) -> None:
    inside = [
        f"{function.name}, line {node.lineno}"
        for function in ast.walk(parsed(module))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert inside == []


def loaded_by(code: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after `code`."""
    report = "import sys; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], check=True, capture_output=True, text=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_lower_layers_and_the_command_line_start_without_torch() -> None:
    without = sorted(m for m in MODULES if layer(m) < 3) + sorted(FACE_WITHOUT_TORCH)
    assert not loaded_by(f"import {', '.join(without)}") & {"torch", "transformers"}
