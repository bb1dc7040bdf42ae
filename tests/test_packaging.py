"""Registration, the loading of _C, and the errors and results of setup.py.

Most tests run a process on a copy of the package with a stand-in for _C, so that they need no
build. They test how mycoll behaves when the compiled module is usable, broken or missing. If
torch's import matters, the process is a new interpreter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from worlds import warm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python/mycoll"
MINOR = ".".join(torch.__version__.split(".")[:2])

# A `_C` that makes gloo groups and records its calls.
STAND_IN = """
from torch.distributed import ProcessGroupGloo
from torch._C._distributed_c10d import Backend

class Options(Backend.Options):
    def __init__(self):
        super().__init__("mycoll")

calls = []

class MycollBackend(ProcessGroupGloo):
    def __init__(self, store, rank, size, timeout, group_id, global_ranks, options, has_device,
                 enable_reconfigure):
        calls.append((store, rank, size, timeout, group_id, global_ranks, options, has_device))
        super().__init__(store, rank, size, timeout=timeout)

def set_nccl_wheel(path):
    pass

def environment():
    return []

def _close_all(reason):
    pass
"""
INIT = """
import torch.distributed as dist
dist.init_process_group({backend!r}, store=dist.HashStore(), rank=0, world_size=1)
"""


class Site:
    """A folder with a copy of the package as pip would install it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.package = path / "mycoll"
        self.package.mkdir(parents=True)
        for source in PACKAGE.glob("*.py"):
            (self.package / source.name).write_text(source.read_text())
        # Entry points as pyproject.toml has them, in the notation of an installed package.
        sections = re.findall(
            r'^\[project\.entry-points\."(.+?)"\]\n((?:\w.*\n)+)',
            (ROOT / "pyproject.toml").read_text(),
            re.MULTILINE,
        )
        info = path / "mycoll-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mycoll\nVersion: 0\n")
        text = "".join(f"[{group}]\n{lines}\n" for group, lines in sections)
        (info / "entry_points.txt").write_text(text.replace('"', ""))

    def built(self, code: str = STAND_IN, minor: str = MINOR) -> Site:
        folder = self.package / f"torch{minor}"
        folder.mkdir(exist_ok=True)
        (folder / "_C.py").write_text(code)
        return self

    is_fresh = False  # interpreters that import torch themselves

    def run(self, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("TORCH", "MYCOLL", "PYTHON"))
        }
        environment = {**kept, "PYTHONPATH": str(self.path), **environment}
        if not self.is_fresh:
            program = warm.start(code, environment=environment, folder=self.path)
            out, error = program.communicate(timeout=120)
            return subprocess.CompletedProcess(code, program.returncode or 0, out, error)
        return subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def passes(self, code: str, **environment: str) -> str:
        done = self.run(code, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, code: str, **environment: str) -> str:
        """The last line of the traceback."""
        done = self.run(code, **environment)
        assert done.returncode != 0, done.stdout
        return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site")


@pytest.fixture
def fresh_site(site: Site) -> Site:
    site.is_fresh = True
    return site


def test_autoload_registers(fresh_site: Site) -> None:
    fresh_site.passes("""if True:
        import os, sys, torch, torch.distributed as dist
        assert "mycoll" in dist.Backend.backend_list
        assert dist.Backend.backend_capability["mycoll"] == ["cpu", "cuda"]
        # Other backends keep their devices, and only these modules of mycoll are loaded.
        assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
        ours = {name for name in sys.modules if name.startswith("mycoll")}
        assert ours == {"mycoll", "mycoll._native", "mycoll._registration", "mycoll._version"}, ours
        """)


@pytest.mark.tools
def test_import_first_and_again(fresh_site: Site) -> None:
    fresh_site.built().passes(
        "import mycoll, torch, importlib\n"
        "from mycoll import _registration\n"
        "for _ in range(3): _registration.register(); _registration.autoload()\n"
        "importlib.reload(mycoll)\n"
        "import torch.distributed as dist\n"
        "assert dist.Backend.backend_list.count('mycoll') == 1\n" + INIT.format(backend="mycoll")
    )


@pytest.mark.tools
def test_autoload_off(fresh_site: Site) -> None:
    code = "import {}\n" + INIT.format(backend="mycoll")
    fresh_site.built().passes(code.format("mycoll"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    fresh_site.passes(code.format("torch, mycoll"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    if tuple(map(int, MINOR.split("."))) >= (2, 14):  # torch asks for a name it does not know
        fresh_site.passes(code.format("torch"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_arguments_of_the_creator(site: Site) -> None:
    site.built().passes("""if True:
        import datetime, mycoll, torch.distributed as dist
        options = mycoll.Options()
        dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1,
                                timeout=datetime.timedelta(seconds=77), pg_options=options)
        from mycoll import _C
        [(store, rank, size, timeout, group_id, ranks, given, _)] = _C.calls
        assert (rank, size, group_id, ranks) == (0, 1, "0", [0]), _C.calls
        assert timeout.total_seconds() == 77 and given is options
        """)


def test_foreign_options(site: Site) -> None:
    """Options of another backend of the group are ignored; other objects are refused."""
    site.built().passes("""if True:
        import torch.distributed as dist
        from torch._C._distributed_c10d import Backend
        dist.init_process_group("cpu:mycoll", store=dist.HashStore(), rank=0, world_size=1,
                                pg_options=Backend.Options("other"))
        from mycoll import _C
        assert _C.calls[0][-2] is None
        """)
    code = INIT.format(backend="mycoll").replace("world_size=1", "world_size=1, pg_options={}")
    assert "pg_options of a mycoll group is a mycoll.Options, not dict" in site.fails(code)


def test_restarts_do_not_use_old_keys(site: Site) -> None:
    code = INIT.format(backend="mycoll") + (
        "from mycoll import _C\nprint(type(_C.calls[0][0].underlying_store).__name__)"
    )
    first = site.built().passes(code, TORCHELASTIC_RESTART_COUNT="0", GROUP_WORLD_SIZE="1")
    again = site.passes(code, TORCHELASTIC_RESTART_COUNT="1", GROUP_WORLD_SIZE="1")
    agents = site.passes(code, TORCHELASTIC_RESTART_COUNT="1", GROUP_WORLD_SIZE="2")
    # torch always adds a prefix for the group; with one agent mycoll adds another.
    assert first == agents
    assert again == "PrefixStore\n"


def test_torch_is_unchanged_before_the_first_group(site: Site) -> None:
    """Importing torch replaces nothing in torch; the first mycoll group does."""
    site.built().passes(
        """if True:
        import sys, types, torch, torch.distributed as dist
        from importlib.metadata import entry_points

        def held():
            return {
                (module.__name__, name): value
                for module in list(sys.modules.values())
                if isinstance(module, types.ModuleType) and module.__name__.startswith("torch")
                for name, value in vars(module).items()
            }

        before, modules = held(), set(sys.modules)
        (entry,) = entry_points(group="torch.backends", name="mycoll")
        entry.load()()
        assert "mycoll" in dist.Backend.backend_list
        after = held()
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] is not after[name]] == []
        assert {name.partition(".")[0] for name in set(sys.modules) - modules} == {"mycoll"}

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.new_group()
        assert dist.monitored_barrier is before["torch.distributed", "monitored_barrier"]
        dist.new_group(backend="mycoll")
        assert dist.monitored_barrier is not before["torch.distributed", "monitored_barrier"]
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_odd_entries_among_the_modules(site: Site) -> None:
    """sys.modules may contain libraries of cffi and lazy modules. Modules that have imported a
    function by name get the wrapper."""
    site.built().passes("""if True:
        import sys, types, torch.distributed as dist

        class Library:  # like cffi's: an instance of ModuleType without a dictionary
            __slots__ = ()
            __class__ = types.ModuleType

        class Raises:
            def __getattribute__(self, name):
                raise RuntimeError(name)

        class Lazy(types.ModuleType):
            def __getattribute__(self, name):
                raise RuntimeError(name)

        users = types.ModuleType("users")
        users.monitored_barrier = original = dist.monitored_barrier
        odd = {"a": Library(), "b": Raises(), "c": Lazy("c"), "d": None, "users": users,
               "e": types.ModuleType.__new__(types.ModuleType)}
        assert isinstance(odd["a"], types.ModuleType)
        sys.modules.update(odd)
        dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
        assert users.monitored_barrier is dist.monitored_barrier is not original
        """)


def test_missing_module(site: Site) -> None:
    site.passes("import torch, mycoll; torch.ones(1)")
    message = site.fails(INIT.format(backend="mycoll"))
    assert "compiled module is missing" in message and "--no-build-isolation" in message


def test_broken_module(site: Site) -> None:
    site.built("raise ImportError('undefined symbol: _ZN3c10')")
    site.passes("import torch, mycoll; torch.ones(1)")
    for code in (INIT.format(backend="mycoll"), "import mycoll; mycoll.Options"):
        message = site.fails(code)
        assert "undefined symbol: _ZN3c10" in message and "--no-build-isolation" in message


def test_other_minor_is_refused(site: Site) -> None:
    site.built(minor="2.9")
    site.passes("import torch, mycoll; torch.ones(1)")
    message = site.fails(INIT.format(backend="mycoll"))
    assert f"compiled for torch 2.9 and cannot work with torch {torch.__version__}" in message
    assert "--no-build-isolation" in message and "or install torch 2.9" in message
    # With a torch that mycoll does not support, the error does not advise to compile again.
    version_file = site.package / "_version.py"
    version_file.write_text(
        version_file.read_text().replace("((2, 11), (2, 15))", "((3, 0), (3, 0))")
    )
    message = site.fails(INIT.format(backend="mycoll"))
    assert message.endswith("pip install 'torch==2.9.*'") and "isolation" not in message
    version_file.write_text((PACKAGE / "_version.py").read_text())
    # A patch release or another local version has the same minor.
    other = f"import torch; torch.__version__ = '{MINOR}.99+other'\n"
    site.built().passes(other + INIT.format(backend="mycoll"))


def test_each_minor_has_its_module(site: Site) -> None:
    """The module for the running torch is loaded, and the others are not opened."""
    minors = ["2.9", "2.10", "2.11", "2.15"]
    for minor in minors:
        site.built(f"import builtins; builtins.loaded.append({minor!r})", minor)
    site.built("def broken(", "2.14")
    code = "import builtins, sys, torch, mycoll; builtins.loaded = []; torch.__version__ = {!r}\n"
    code += "from mycoll._native import native\n"
    for running, minor in (("2.11.0+cu130", "2.11"), ("2.15.0a0+git1", "2.15"), ("2.9.1", "2.9")):
        loads = f"""if True:
            import mycoll._C
            assert loaded == [{minor!r}], loaded
            assert native() is mycoll._C is sys.modules["mycoll._C"] and loaded == [{minor!r}]
            assert mycoll._C.__name__ == "mycoll._C" and "torch{minor}/" in mycoll._C.__file__
            """
        site.passes(code.format(running) + loads)
    for ask in ("native()", "from mycoll import _C", "import mycoll._C"):
        message = site.fails(code.format("2.16.0") + ask)
        assert "compiled for torch 2.9, 2.10, 2.11, 2.14, 2.15 and cannot work with" in message
        assert message.endswith("supports torch 2.11 to 2.15: pip install 'torch==2.15.*'")


def test_a_module_of_another_python(site: Site) -> None:
    """A second interpreter uses an editable install."""
    site.built()
    (site.package / f"torch{MINOR}/_C.py").rename(
        site.package / f"torch{MINOR}/_C.cpython-39-x86_64-linux-gnu.so"
    )
    assert "compiled module is missing" in site.fails(INIT.format(backend="mycoll"))


def test_an_unsupported_torch_is_not_compiled_for(site: Site) -> None:
    """The error does not advise to compile again, which would take minutes and fail."""
    init = "import torch; torch.__version__ = '2.10.0+cpu'\n" + INIT.format(backend="mycoll")
    for code in (init, "import torch; torch.__version__ = '2.16.0'\nimport mycoll; mycoll.Options"):
        message = site.fails(code)
        assert "supports torch 2.11 to 2.15, and this is torch 2.1" in message
        assert "--no-build-isolation" not in message
    message = site.built(minor="2.13").fails(init)
    assert message.endswith("supports torch 2.11 to 2.15: pip install 'torch==2.13.*'")


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ("engine", f"this mycoll was compiled for torch 2.9 and cannot work with torch {MINOR}."),
        ("gloo", "MYCOLL_CPU=gloo asks for torch's gloo"),
    ],
    ids=["other minor", "MYCOLL_CPU"],
)
def test_gloo_that_cannot_be_replaced_works(site: Site, chosen: str, why: str) -> None:
    """One warning names the reason, even if repeated warnings are shown."""
    output = site.built(minor="2.9" if chosen == "engine" else MINOR).passes(
        """if True:
        import warnings, torch, torch.distributed as dist
        warnings.simplefilter("always")
        warnings.showwarning = lambda text, *more: print(text)
        torch._import_device_backends()  # as torch's import does
        import mycoll
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        part = dist.new_group([0], backend="gloo")
        for group in (dist.group.WORLD, part):
            x = torch.ones(3)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [1.0] * 3
            assert type(group._get_backend(torch.device("cpu"))) is dist.ProcessGroupGloo
        dist.destroy_process_group()
        """,
        MYCOLL_REPLACE="gloo",
        MYCOLL_CPU=chosen,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert output.count("\n") == 1, output
    assert output.startswith(f"MYCOLL_REPLACE=gloo has no effect: {why}"), output


def test_another_system(site: Site) -> None:
    """torch can be imported, a mycoll group is refused, and MYCOLL_CPU=gloo works."""
    site.built()
    code = "import sys; sys.platform = 'darwin'\nimport torch, mycoll\n"
    for ask in (INIT.format(backend="mycoll"), "mycoll.Options"):
        message = site.fails(code + ask)
        assert "mycoll works on Linux, and this is darwin: with MYCOLL_CPU=gloo" in message
    site.passes(code + INIT.format(backend="mycoll"), MYCOLL_CPU="gloo")


def test_failed_registration_does_not_break_torch(site: Site) -> None:
    registration = site.package / "_registration.py"
    registration.write_text(
        registration.read_text().replace(
            "import torch.distributed as dist\n", "raise OSError(5)\n", 1
        )
    )
    site.passes("import torch; torch.ones(1)")
    message = site.fails("import torch, mycoll; mycoll.Options")
    assert message == "ImportError: mycoll could not register itself: OSError(5)"


def test_functions_that_torch_refuses_by_name(site: Site) -> None:
    site.built().passes("""if True:
        import warnings, torch, torch.distributed as dist
        from datetime import timedelta
        from torch.distributed import distributed_c10d as c10d
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # 2.15: _set_pg_timeout has a successor
        from torch.distributed import monitored_barrier, split_group  # bound before any group
        from torch.distributed.device_mesh import split_group as of_meshes
        assert monitored_barrier is dist.monitored_barrier and split_group is of_meshes
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        monitored_barrier()
        ours = dist.new_group(backend="mycoll")
        mixed = dist.new_group(backend="cpu:mycoll,cuda:gloo")
        gloo = dist.new_group(backend="gloo")
        assert dist.monitored_barrier is c10d.monitored_barrier
        for group in (None, ours, mixed, gloo):
            dist.monitored_barrier(group)
            monitored_barrier(group=group, timeout=timedelta(seconds=5), wait_all_ranks=True)
            c10d._set_pg_timeout(timedelta(seconds=5), group)
        part = split_group(ours, [[0]], group_desc="a part")
        assert dist.get_backend(part) == "mycoll" and part.group_desc == "a part"
        dist.all_reduce(torch.ones(3), group=part)
        part = dist.split_group(mixed, [[0]])
        assert dist.get_backend_config(part) == "cpu:mycoll,cuda:gloo"
        for wrong in ([[0, 0]], [[1]], [[]]):
            try: dist.split_group(ours, wrong)
            except ValueError: pass
            else: raise AssertionError(wrong)
        """)
    # Other backends are refused as before, with and without the wrapper.
    fake = "import torch.testing._internal.distributed.fake_pg\n" + INIT.format(backend="fake")
    for code in ("", "dist.new_group(backend='mycoll')\n"):
        done = site.run(fake + code + "dist.monitored_barrier()")
        if tuple(map(int, MINOR.split("."))) < (2, 15):
            assert re.search("only (implemented for )?GLOO", done.stderr), done.stderr


# --- setup.py -------------------------------------------------------------------------------------


def test_setup_on_another_system() -> None:
    code = "import runpy, sys; sys.platform = 'win32'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "mycoll works on Linux, and this is win32.\n"


def words_of_setup(version: str) -> list[str]:
    """The error of setup.py when importlib.metadata has this `version` function."""
    code = (
        "import importlib.metadata as m, runpy, sys\n"
        f"{version}\n"
        "m.version = version; sys.argv = ['setup.py', 'egg_info']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    pytest.importorskip("setuptools")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(lines) == 2, done.stderr
    return lines


def test_setup_without_torch() -> None:
    """As in an isolated build."""
    lines = words_of_setup("def version(name): raise m.PackageNotFoundError(name)")
    assert "compiled against your torch" in lines[0]
    assert "pip install --no-build-isolation ." in lines[1]


def test_setup_with_old_setuptools() -> None:
    lines = words_of_setup("def version(name): return '65.5.0'")
    assert "setuptools 77 or newer, and this is 65.5.0" in lines[0]
    assert "pip install 'setuptools>=77'" in lines[1]


@pytest.mark.parametrize("torch_version", ["2.10.0", "2.16.0a0", "1.13.1"])
def test_setup_with_unsupported_torch(torch_version: str) -> None:
    """The error is raised before anything is compiled."""
    found = f"'{torch_version}' if name == 'torch' else '80.0'"
    lines = words_of_setup(f"def version(name): return {found}")
    assert f"torch 2.11 to 2.15, and this is torch {torch_version}" in lines[0]
    assert "pip install 'torch>=2.11,<2.16'" in lines[1]


@pytest.mark.tools
@pytest.mark.parametrize(
    ("variables", "problem", "remedy"),
    [
        ({"CXX": "no-such-compiler"}, "there is no no-such-compiler", "apt-get install g++"),
        ({"CXX": "false"}, "supports C++20, and false does not", "g++-12"),
    ],
)
def test_setup_without_compiler(
    variables: dict[str, str], problem: str, remedy: str, tmp_path: Path
) -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext", "-b", str(tmp_path), "-t", str(tmp_path)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 1 and problem in lines[-2] and remedy in lines[-1], done.stderr
    assert "Traceback" not in done.stderr


def configure(
    source: Path, tree: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    scripts = sysconfig.get_path("scripts")
    tools = [shutil.which(name, path=scripts) or shutil.which(name) for name in ("cmake", "ninja")]
    if None in tools:
        pytest.skip("the build needs cmake and ninja")
    cmake, ninja = tools
    command = [cmake, "-S", source, "-B", tree, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    return subprocess.run(
        [*command, f"-DMYCOLL_PYTHON={sys.executable}", *options],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


@pytest.mark.tools
def test_a_compiler_that_links_libstdcxx_statically(tmp_path: Path) -> None:
    """With two copies of libstdc++ in a process, the first group would crash."""
    done = configure(ROOT, tmp_path, LDFLAGS="-static-libstdc++")
    words = " ".join(done.stderr.split())
    assert done.returncode and "puts a libstdc++ of its own into what it links" in words, words
    assert "CXX=/usr/bin/g++, for instance" in words


def sources(root: Path) -> set[str]:
    """The files that build and test mycoll: those of a checkout without the results of builds."""
    names = ("CMakeLists.txt", "CMakePresets.json", "dev", "pyproject.toml", "setup.py")
    files = [*(root / name for name in names), *root.glob("requirements-*.txt")]
    files += [*root.glob("python/mycoll/**/*.py"), *root.glob("python/mycoll/*.pyi")]
    for folder in (".ci", "benchmarks", "csrc", "docs", "examples", "tests"):
        files += [file for file in (root / folder).rglob("*") if file.is_file()]
    return {str(file.relative_to(root)) for file in files if file.suffix != ".pyc"}


@pytest.mark.tools
def test_source_distribution(tmp_path: Path) -> None:
    """The source distribution contains everything that a build needs, and CMake configures it."""
    if not find_spec("setuptools") or int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77")
    # A separate egg-info, so that the file list of an earlier build is not used.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path]
    done = subprocess.run(
        [*command, "sdist", "--dist-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("mycoll-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    assert sources(ROOT) - sources(unpacked) == set()
    done = configure(unpacked, tmp_path / "tree", "-DMYCOLL_TESTS=ON")
    assert done.returncode == 0, done.stderr


@pytest.mark.tools
def test_wheel(tmp_path: Path) -> None:
    """The wheel is made, unpacked in another folder, and used."""
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    for needed in ("pip", "setuptools", "wheel"):
        if not find_spec(needed):  # pip and setuptools cannot be imported in the same process
            pytest.skip(f"the build needs {needed}")
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip("the build needs setuptools 77")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-q"]
    done = subprocess.run(
        [*pip, "-w", tmp_path, ROOT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("mycoll-*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-linux_" in wheel.name
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    binaries = {str(path.relative_to(site)) for path in site.rglob("*.so")}
    module = f"mycoll/torch{MINOR}/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert binaries == {module, "mycoll/libmycoll.so"}
    metadata = next(site.glob("*.dist-info/METADATA")).read_text()
    assert f"Requires-Dist: torch=={MINOR}.*" in metadata
    assert "Requires-Dist: numpy" in metadata
    assert (site / "mycoll/py.typed").exists() and (site / "mycoll/_C.pyi").exists()
    assert (site / "mycoll/errors.md").read_text() == (ROOT / "docs/errors.md").read_text()
    code = INIT.format(backend="mycoll") + "import torch\ndist.all_reduce(torch.ones(3))"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PYTHONPATH"] = str(site)
    subprocess.run([sys.executable, "-c", code], cwd=site, env=environment, check=True, timeout=120)
