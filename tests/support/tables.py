"""Tables in README.md and docs/ that are made of what the code says: folders, presets, the fields
of a plan."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path

from meshfold.cost_models.hardware.devices import presets
from meshfold.plan_file.schema import plan_schema

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "compiler": "meshfold",
    "passes": "meshfold.passes",
    "cost_models": "meshfold.cost_models",
}
OTHERS = {
    "tests": "Mirrors the three folders of code, and holds the documents and the examples.",
    "examples": "The demo, two training scripts, model configurations.",
    "docs": "The documents that are named above.",
    "benchmarks": "The scripts behind [figures](docs/figures.md).",
}


def sentence(folder: Path) -> str:
    """The first sentence of the folder's __init__."""
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text)) or ""
    text = " ".join(doc.split("\n\n")[0].split()).removeprefix("meshfold: ")
    return f"{text[0].upper()}{text[1:]}".split(". ")[0].removesuffix(".") + "."


def top_table() -> str:
    code = [f"| `{f}/` | `{name}` | {sentence(ROOT / f)} |" for f, name in PACKAGES.items()]
    others = [f"| `{f}/` | | {text} |" for f, text in OTHERS.items()]
    return _table([*code, *others])


def code_table() -> str:
    """Every folder of code, in the order in which imports go down."""
    rows = []
    for name in order():
        folder = folder_of(name)
        if folder.is_dir():
            rows.append(f"| `{folder.relative_to(ROOT)}/` | `{name}` | {sentence(folder)} |")
    return _table(rows)


def _table(rows: list[str]) -> str:
    return table("folder | import name | what it is", rows)


def table(header: str, rows: list[str]) -> str:
    line = "|".join("---" for _ in header.split("|"))
    return "\n".join([f"| {header} |", f"|{line}|", *rows, ""])


def order() -> tuple[str, ...]:
    """ORDER of tests/repo/test_layers.py."""
    tree = ast.parse((ROOT / "tests" / "repo" / "test_layers.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORDER":
            return tuple(ast.literal_eval(node.value))
    raise LookupError("test_layers.py has no ORDER")


def folder_of(package: str) -> Path:
    top = max((p for p in PACKAGES.values() if f"{package}.".startswith(f"{p}.")), key=len)
    folder = next(f for f, name in PACKAGES.items() if name == top)
    return ROOT.joinpath(folder, *package.removeprefix(top).strip(".").split("."))


def preset_table() -> str:
    rows = []
    for name, preset in presets().items():
        device, group = preset.group.device, preset.group
        per_node = "as many as asked for" if preset.one_node else str(group.devices_per_node)
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        network = "-" if preset.one_node else preset.network.name
        rows.append(
            f"| `{name}` | {per_node} | {device.name}, {memory} | {group.link.name} | {network} |"
        )
    return table("preset | devices per node | device | link in a node | network", rows)


def fields_table(*records: tuple[str, str]) -> str:
    """The fields of records, each with what the schema says of it: (prefix, name in $defs)."""
    schema = plan_schema()
    rows = [
        f"| `{prefix}{name}` | {field.get('description', '')} |"
        for prefix, record in records
        for name, field in (schema["$defs"][record] if record else schema)["properties"].items()
    ]
    return table("field | what it is", rows)


def plan_table() -> str:
    return fields_table(("", ""))


def estimate_table() -> str:
    return fields_table(
        ("time.", "TimeEstimate"), ("throughput.", "Throughput"), ("memory.", "MemoryEstimate")
    )


def search_table() -> str:
    return fields_table(("search.", "SearchStats"), ("search.meshes[].", "MeshOutcome"))


def stage_table() -> str:
    return fields_table(("stages[].runs[].", "RegionRun"), ("stages[].costs.", "StageCosts"))


def region_table() -> str:
    return fields_table(
        ("regions[].", "RegionPlan"),
        ("regions[].parameters[].", "ParameterPlacement"),
        ("regions[].conversions[].", "ConversionRecord"),
        ("regions[].alternatives[].", "Alternative"),
    )


TABLES: Mapping[str, Callable[[], str]] = {
    "top": top_table,
    "code": code_table,
    "presets": preset_table,
    "plan": plan_table,
    "estimate": estimate_table,
    "search": search_table,
    "stage": stage_table,
    "region": region_table,
}
