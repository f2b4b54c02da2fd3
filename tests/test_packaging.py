"""What the wheel installs: our packages and nothing else at the top, with the data files that they read."""

import os
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[1]
PACKAGES = [
    ROOT / "fineserve_sim",
    ROOT / "traces" / "fineserve_traces",
    ROOT / "calibrate" / "fineserve_calibrate",
    ROOT / "calibrate" / "fineserve_evidence",
    ROOT / "runtime" / "fineserve_runtime",
]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("wheel")
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        wheel = build_wheel(str(folder))
    finally:
        os.chdir(before)
    with zipfile.ZipFile(folder / wheel) as archive:
        return archive.namelist()


def test_only_our_packages_are_at_the_top(names: list[str]) -> None:
    top = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert top == {package.name for package in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_file_of_a_package_is_in_the_wheel(package: Path, names: list[str]) -> None:
    files = [file for file in package.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert {file.relative_to(package.parent).as_posix() for file in files} <= set(names)


def test_data_travels_along(names: list[str]) -> None:
    """Of the three packages that have some: systems and catalog, length sketches, measured sets."""
    data = [name for name in names if Path(name).suffix in {".yaml", ".json", ".npz"}]
    assert {name.split("/")[0] for name in data} == {"fineserve_sim", "fineserve_traces", "fineserve_evidence"}
    assert any(name.endswith("reproduce/targets.yaml") for name in data)


def test_the_licence_and_the_notice_travel_along(names: list[str]) -> None:
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
