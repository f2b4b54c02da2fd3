"""What the wheel installs: our packages and nothing else at the top, with the data files that they read."""

import os
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

ROOT = Path(__file__).parents[1]


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
    assert all(name.startswith("fineserve_") for name in top), top
    assert {"fineserve_sim", "fineserve_traces"} <= top


def test_every_data_file_of_the_packages_is_in_the_wheel(names: list[str]) -> None:
    packages = [ROOT / "fineserve_sim", ROOT / "traces" / "fineserve_traces"]
    data = [
        str(file.relative_to(package.parent))
        for package in packages
        for file in package.rglob("*")
        if file.suffix in {".yaml", ".json", ".npz", ".gz"}
    ]
    assert len(data) > 8
    assert set(data) <= set(names)


def test_the_licence_and_the_notice_travel_along(names: list[str]) -> None:
    assert {Path(name).name for name in names if "/licenses/" in name} == {"LICENSE", "NOTICE"}
