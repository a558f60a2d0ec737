"""What is installed: every package folder, nothing but meshfold."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "setuptools"
]
NOT_CODE = {"tests", "examples", "benchmarks", "docs", "build", "dist"}


def test_every_package_folder_is_listed() -> None:
    # An unlisted folder works in the checkout and is missing from the wheel.
    top = {path.parent.name for path in ROOT.glob("*/__init__.py")} - NOT_CODE
    assert top == set(SETUPTOOLS["package-dir"].values())
    packages = {
        ".".join((package, *path.parent.relative_to(ROOT / folder).parts))
        for package, folder in SETUPTOOLS["package-dir"].items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages)
    assert not [p for p in folders_of_code() if not (p / "__init__.py").is_file()]


def folders_of_code() -> set[Path]:
    tops = SETUPTOOLS["package-dir"].values()
    return {path.parent for folder in tops for path in (ROOT / folder).rglob("*.py")}


@pytest.mark.slow
def test_the_wheel_holds_meshfold_only_and_works_alone(tmp_path: Path) -> None:
    # From a copy of the sources: a stale build/ in the checkout would leak into the wheel.
    checkout = tmp_path / "checkout"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."],
        cwd=checkout,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert {n.split("/")[0] for n in names} == {"meshfold"}
    wanted = {
        f"{package.replace('.', '/')}/{path.relative_to(checkout / folder)}"
        for package, folder in SETUPTOOLS["package-dir"].items()
        for path in (checkout / folder).rglob("*")
        if path.suffix in (".py", ".json", ".typed")
    }
    assert set(names) == wanted
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "import meshfold; from meshfold.cost_models.hardware.devices import resolve_cluster; "
        "from meshfold.cli.main import run; resolve_cluster('dgx-h100'); run(['--version']); "
        "print(meshfold.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        check=True,
        capture_output=True,
        text=True,
    )
    version, path = done.stdout.split()
    assert version == "0.1.0"
    assert Path(path).is_relative_to(tmp_path / "installed")
