"""The wheel that `./dev wheel` has made for this Python: its files, its requirements, and that it
works in a process without a compiler. `./dev wheel --try` also tests it with each torch."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")


@pytest.fixture(scope="module", params=("x86_64", "aarch64"))
def wheel(request: pytest.FixtureRequest) -> Path:
    names: dict[str, str] = {}
    exec((ROOT / "python/mycoll/_version.py").read_text(), names)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    made = [
        *(ROOT / "dist").glob(f"mycoll-{names['__version__']}-{tag}-{tag}-*_{request.param}.whl")
    ]
    if not made:
        pytest.skip("./dev wheel has made none for this Python")
    return max(made, key=lambda path: path.stat().st_mtime)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_modules_for_each_minor(wheel: Path, site: Path) -> None:
    machine = wheel.stem.split("_", 3)[-1]
    suffix = sysconfig.get_config_var("EXT_SUFFIX").replace(platform.machine(), machine)
    binaries = {str(path.relative_to(site)) for path in site.rglob("*.so*")}
    modules = {f"mycoll/torch{minor}/_C{suffix}" for minor in MINORS}
    assert binaries == modules | {"mycoll/libmycoll.so"}
    assert wheel.stat().st_size <= 8_000_000
    metadata = next(site.glob("*.dist-info/METADATA")).read_text()
    [required] = re.findall(r"^Requires-Dist: torch([<>].*)", metadata, re.MULTILINE)
    assert sorted(required.split(",")) == ["<2.16", ">=2.11"]
    for name in ("_C.py", "_C.pyi", "py.typed", "errors.md"):
        assert (site / "mycoll" / name).exists()


def test_glibc(wheel: Path, site: Path) -> None:
    """The wheel's tag is for glibc 2.28 or older, and no module needs a newer one."""
    system = re.search(r"manylinux_2_(\d+)_", wheel.name)
    assert system and int(system[1]) <= 28, wheel.name
    for module in site.rglob("*.so"):
        needs = subprocess.run(["readelf", "-V", module], capture_output=True, text=True).stdout
        glibc = {int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", needs)}
        libstdcxx = {int(patch) for patch in re.findall(r"Name: GLIBCXX_3\.4\.(\d+)", needs)}
        # The versions of Red Hat 8, whose compiler builds torch's wheels.
        assert glibc and max(glibc) <= 28, (module, glibc)
        assert libstdcxx and max(libstdcxx) <= 25, (module, libstdcxx)


def test_groups_work(wheel: Path, site: Path, tmp_path: Path) -> None:
    if not wheel.stem.endswith(platform.machine()):
        pytest.skip("./dev arm --wheel tries it")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MYCOLL"))}
    environment |= {"PATH": "", "PYTHONPATH": str(site)}
    smoke = [sys.executable, ROOT / ".ci/smoke.py", tmp_path / "store"]
    done = subprocess.run(
        smoke, cwd=site, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert re.match(r"mycoll \S+ works with torch 2", done.stdout)
