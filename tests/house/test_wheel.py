"""Wheels built from a checkout are complete, and work where there is no checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import NOTEBOOKS, tracked

LEFT_OUT = ("runs/", ".")  # the evidence, and the files of git and of tools
BUILD = "from setuptools import build_meta as b; b.build_wheel('out'); b.build_sdist('out')"
pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.environment(of="wheel")]


def shipped() -> dict[str, Path]:
    return {name: file for name, file in tracked().items() if not name.startswith(LEFT_OUT)}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the sdist of a copy of this checkout."""
    copy = tmp_path_factory.mktemp("build")
    for name, file in shipped().items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy / name)
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return copy / "out"


def test_the_wheel_has_the_package_whole_and_the_notebooks_in_it(built):
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    (outside,) = [name for name in held if ".data/" in name]  # of Jupyter, not of Python
    assert outside.endswith("data/etc/jupyter/jupyter_server_config.d/nsa.json")
    package = {name for name in shipped() if name.startswith(("nsa/", "whyhung/", "workbook/"))}
    package |= {"nsa_autoload/__init__.py"}  # nsa/autoload under its second name
    notebooks = {f"workbook/{name}" for name in shipped() if name.startswith("notebooks/")}
    assert held - {outside} == package | notebooks


def test_the_sdist_has_all_but_the_evidence(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        held = {name.partition("/")[2] for name in packed.getnames()}
    assert shipped().keys() - held == set()


def test_the_wheel_lists_its_notebooks_where_there_is_no_checkout(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    place = tmp_path / "project"
    place.mkdir()

    def printed(*words: str) -> str:
        command = [sys.executable, "-m", "nsa", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=True
        ).stdout

    listed = printed("notebooks")
    assert [file.stem for file in NOTEBOOKS.glob("*.ipynb") if file.stem not in listed] == []
    assert f"They lie in {tmp_path}/site/workbook/notebooks, and runs go to runs." in listed
    assert "next: cd mine && nsa run" in printed("notebooks", "init", "mine")
    assert (place / "mine/notebooks/params/h200.yaml").is_file()
