"""Drives CMake and ninja for mycoll._C; everything else about the package is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

try:
    TORCH = version("torch")
except PackageNotFoundError:
    sys.exit(
        "mycoll is compiled against your torch; this build sees none (pip isolates builds).\n"
        "Do: pip install torch cmake ninja wheel 'setuptools>=77'"
        " && pip install --no-build-isolation ."
    )

if int(version("setuptools").split(".")[0]) < 77:
    sys.exit(
        f"mycoll's build needs setuptools 77 or newer, and this is {version('setuptools')}.\n"
        "Do: pip install 'setuptools>=77' && pip install --no-build-isolation ."
    )


def tool(name: str) -> str:
    """The tool beside this interpreter (pip does not put that on PATH), or the one on PATH."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    return found or sys.exit(f"mycoll's build needs {name}.\nDo: pip install {name}")


class CMakeBuild(build_ext):  # type: ignore[misc]  # setuptools is untyped
    """Builds in a tree of its own for each Python and torch, so that the second build is short."""

    def run(self) -> None:
        tree = ROOT / "build" / f"{sys.implementation.cache_tag}-torch{TORCH}"
        cmake, ninja = tool("cmake"), tool("ninja")
        choices = [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DMYCOLL_PYTHON={sys.executable}"]
        subprocess.run([cmake, "-S", ROOT, "-B", tree, "-G", "Ninja", *choices], check=True)
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        subprocess.run([cmake, "--build", tree, "--target", "_C", *jobs], check=True)
        target = Path(self.get_ext_fullpath("mycoll._C")).parent  # in place when editable
        target.mkdir(parents=True, exist_ok=True)
        for built in (tree / "module").iterdir():
            shutil.copy2(built, target / built.name)


setup(
    ext_modules=[Extension("mycoll._C", sources=[])],  # empty: it only gives the wheel its tag
    cmdclass={"build_ext": CMakeBuild},
    # Virtual functions of c10d::Backend move between minors of torch: one build, one minor.
    # torch does not ask for numpy, but its object collectives (all_gather_object, ...) need it.
    install_requires=[f"torch=={'.'.join(TORCH.split('.')[:2])}.*", "numpy"],
)
