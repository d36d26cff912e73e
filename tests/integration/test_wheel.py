"""The wheel, installed elsewhere and tried from an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import flashrec

ROOT = Path(__file__).parents[2]
PACKAGES = {"flashrec": ROOT / "flashrec", "flashrecd": ROOT / "daemon" / "flashrecd"}
# Paths only: no PYTHONPATH, and nothing else by which the checkout could be found.
ENVIRONMENT = {"PATH": os.defpath}


@dataclass(frozen=True)
class Installed:
    """A fresh environment with the wheel in it, and an empty folder to stand in."""

    bin: Path
    site_packages: Path
    empty: Path

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.empty,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves `build/` behind, from which a later wheel takes stale files."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in ("flashrec", "daemon"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source)],
        check=True,
        timeout=120,
    )
    (path,) = built.iterdir()
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Third-party packages are taken from the environment the tests run in, which a line in a .pth file
    makes visible without its own .pth files, so without its editable install of this checkout."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    paths = sysconfig.get_paths("venv", vars={"base": str(home), "platbase": str(home)})
    site_packages = Path(paths["purelib"])
    (site_packages / "third_party.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)],
        check=True,
        timeout=120,
    )
    return Installed(home / "bin", site_packages, tmp_path_factory.mktemp("empty"))


def test_wheel_holds_two_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"flashrec-{flashrec.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in names


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_source_file(wheel: Path, package: str) -> None:
    folder = PACKAGES[package]
    sources = {f"{package}/{path.relative_to(folder)}" for path in folder.rglob("*.py")}
    carried = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(f"{package}/")}
    assert carried >= sources | {f"{package}/py.typed"}
    if package == "flashrec":
        assert {"flashrec/demo/train.py", "flashrec/demo/reference.py"} <= carried


@pytest.mark.parametrize("package", PACKAGES)
def test_installed_package_is_not_the_checkout(installed: Installed, package: str) -> None:
    done = installed.run("python", "-c", f"import {package}; print({package}.__file__)")
    assert Path(done.stdout.strip()) == installed.site_packages / package / "__init__.py", done.stderr


@pytest.mark.parametrize("program", ["flashrec", "flashrecd"])
def test_program_tells_its_version(installed: Installed, program: str) -> None:
    done = installed.run(program, "--version")
    assert done.returncode == 0, done.stderr
    assert flashrec.__version__ in done.stdout


def test_importing_either_package_imports_no_torch(installed: Installed) -> None:
    code = "import flashrec, flashrecd, sys; sys.exit('torch' in sys.modules)"
    done = installed.run("python", "-c", code)
    assert done.returncode == 0, done.stderr


def test_two_ranks_train_from_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    script = installed.site_packages / "flashrec" / "demo" / "train.py"
    tiny = ["--width", "32", "--layers", "1", "--batch", "1", "--epoch-steps", "3", "--steps", "5"]
    done = installed.run(
        "flashrec", "run", "--nproc-per-node", "2", str(script), "--out", str(tmp_path), *tiny, timeout_s=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = [json.loads((tmp_path / f"outcome.r{rank}.json").read_text()) for rank in range(2)]
    assert [len(outcome["losses"]) for outcome in outcomes] == [5, 5]
    assert outcomes[0]["tensors"] == outcomes[1]["tensors"]
    assert not any(installed.empty.iterdir())
