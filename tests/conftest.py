"""Options, the shared worlds, and their parametrisation. How a world works: worlds/__init__.py."""

from __future__ import annotations

import fnmatch
import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

gc.disable()  # until the tests are collected: it would visit all of torch repeatedly

import pytest  # noqa: E402
import torch  # noqa: E402

TESTS = Path(__file__).resolve().parent
PYTHON_PATHS = [str(TESTS)]  # for `worlds`, here and (through PYTHONPATH) in the workers
if importlib.util.find_spec("mycoll") is None:
    PYTHON_PATHS.append(str(TESTS.parent / "python"))  # not installed: perhaps built in place
sys.path[:0] = PYTHON_PATHS

from faults.harness import SUITE_PATIENCE, Stage  # noqa: E402
from worlds import device as devices  # noqa: E402
from worlds import gloo_gaps, ports, servers, warm  # noqa: E402
from worlds.pool import Options, Pool, World  # noqa: E402

BUILD_HINT = (
    "mycoll is not built for this Python and torch: run `pip install --no-build-isolation -e .` in "
    "the repository (or check the tests themselves with --backend gloo)"
)


def cpp_tests() -> Path | None:
    """The C++ tests and stand-ins of the build whose mycoll is imported. ./dev and CMake put mycoll
    into TREE/site; an editable install uses the tree of setup.py."""
    spec = importlib.util.find_spec("mycoll")
    tag = f"{sys.implementation.cache_tag}-torch{torch.__version__}"
    trees = [Path(spec.origin).parents[2]] if spec and spec.origin else []
    for tree in (*trees, TESTS.parent / "build" / tag):
        if (tree / "tests/discover.cmake").exists():
            return tree / "tests"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mycoll")
    group.addoption(
        "--backend", default="mycoll", choices=["mycoll", "gloo"], help="which backend is tested"
    )
    group.addoption(
        "--device",
        default="standin",
        choices=["standin", "cuda"],
        help="the device of the tests of device tensors (cuda: `./dev gpu`)",
    )
    group.addoption("--large", action="store_true", help="also tests that need 24 GiB of memory")
    group.addoption(
        "--deadline",
        type=float,
        help="seconds after which a job counts as hung (60; on CUDA 300, as ranks may share a GPU)",
    )
    group.addoption("--seed", type=int, default=None, help="of the random walks: only this one")
    group.addoption(
        "--must-run",
        action="store_true",
        help="skipped tests fail, unless tests/must_run.txt excuses them: .ci/run",
    )
    group.addoption(
        "--native-stacks", action="store_true", help="gdb's view of hung workers, in the report"
    )


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("MYCOLL_REPLACE"):  # applied when torch was imported, above
        raise pytest.UsageError("unset MYCOLL_REPLACE: tests compare mycoll with gloo")
    config.addinivalue_line("markers", "large: needs 24 GiB of memory; run with --large")
    config.addinivalue_line(
        "markers", "worlds(*sizes, tcp=()): the sizes of a test's worlds, and of those over TCP"
    )
    config.addinivalue_line("markers", "transports(*names): the transports that a test runs over")
    config.addinivalue_line("markers", "quick: part of ./dev test --quick")
    config.addinivalue_line(
        "markers", "tools: starts programs that import torch anew, as users do: ./dev test --tools"
    )
    os.environ.setdefault("MYCOLL_TRACE_FILE", "off")  # tests make many groups fail
    if "CPP_TEST_DIR" not in os.environ and (folder := cpp_tests()):
        os.environ["CPP_TEST_DIR"] = str(folder)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(PYTHON_PATHS + ([inherited] if inherited else []))
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        servers.share()
        warm.share()


def pytest_collection_finish() -> None:
    gc.freeze()  # torch and the tests, which remain until the end
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`world`: a shared world of each size (default 3) over shared memory, and over TCP for the
    sizes in the marker's `tcp`. `transport`: both, or those of the marker `transports`."""
    gloo = metafunc.config.getoption("--backend") == "gloo"
    marker = metafunc.definition.get_closest_marker("worlds")
    if "world" in metafunc.fixturenames:
        sizes = marker.args if marker and marker.args else (3,)
        params = [(size, "" if gloo else "shm") for size in sizes]
        if marker and not gloo:
            params += [(size, "tcp") for size in marker.kwargs.get("tcp", ())]
        ids = [f"{size}x{transport or 'gloo'}" for size, transport in params]
        metafunc.parametrize("world", params, ids=ids, indirect=True)
    elif "device_world" in metafunc.fixturenames:
        sizes = marker.args if marker and marker.args else (2,)
        paths = marker.kwargs.get("paths", ("nccl", "host")) if marker else ("nccl", "host")
        params = device_params(metafunc.config, sizes, paths)
        metafunc.parametrize("device_world", params, indirect=True)
    elif "transport" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("transports")
        transports = ("",) if gloo else only.args if only else ("shm", "tcp")
        metafunc.parametrize("transport", transports, ids=[t or "gloo" for t in transports])


def device_params(config: pytest.Config, sizes: Sequence[int], paths: Sequence[str]) -> list:
    """(size, path) of each world for a test of device tensors; unavailable ones are skipped."""
    device = config.getoption("--device")
    params = []
    for size in sizes:
        for path in devices.paths(device, size, paths):
            reason = devices.missing(device, path)
            if config.getoption("--backend") == "gloo":
                reason = "gloo: specific to mycoll"
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            params.append(pytest.param((size, path), id=f"{size}x{path}", marks=marks))
    return params


def must_run(name: str) -> bool:
    """Whether must_run.txt requires a test with this name to run."""
    verdict = True
    for line in (TESTS / "must_run.txt").read_text().splitlines():
        pattern = line.partition("#")[0].strip()
        if pattern and fnmatch.fnmatchcase(name, pattern.removeprefix("!")):
            verdict = not pattern.startswith("!")
    return verdict


def forbid_skip(report: Any, config: pytest.Config, name: str) -> Any:
    is_skipped = report.skipped and not hasattr(report, "wasxfail")
    if is_skipped and config.getoption("--must-run") and must_run(name):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"must not be skipped (tests/must_run.txt): {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    return forbid_skip(report, item.config, item.nodeid.removeprefix("tests/"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield  # for example, of a file that is skipped as a whole
    return forbid_skip(report, collector.config, collector.nodeid.removeprefix("tests/") + "::")


# Started first, the longest first, so that no process works for minutes while the other has nothing
# left to do. The other C++ programs are short and are started last.
FIRST = [
    "test_gpu_program", "test_device_conformance", "test_replace", "test_reductions",
    "test_examples", "test_device_endings", "test_elastic", "test_moves", "test_shared_tensors",
    "test_spawn", "test_ops", "test_cpp.py::test_cpp[plan_test]", "test_device_options",
    "test_compile", "test_device_failures", "test_environment", "test_faults",
    "test_cpp.py::test_cpp[hosts_test]", "test_cpp.py::test_cpp[formation_test]",
    "test_cpp.py::test_cpp[leaving_test]", "test_two_hosts", "test_launchers", "test_demo",
    "test_failures", "test_limits", "test_trace", "test_device_messages",
    "test_cpp.py::test_cpp[engine_test]", "test_cpp.py::test_cpp[deadlock_test]",
    "test_random_walk", "test_objects", "test_packaging", "test_leaks",
    "test_cpp.py::test_cpp[many_test]", "test_cpp.py::test_cpp[simulation_test]",
    "test_cpp.py::test_cpp[reduce_test]",
]  # fmt: skip


def place(nodeid: str) -> int:
    """A key for sorting: tests in FIRST, then the others, then the other C++ programs."""
    name = nodeid.rpartition("tests/")[2]
    for number, first in enumerate(FIRST):
        if name == first or name.startswith(f"{first}.py::"):
            return number
    return len(FIRST) + name.startswith("test_cpp.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process runs all tests of a file, so that they share worlds. Each C++ program may run in
    any process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "test_cpp.py::" in nodeid else super()._split_scope(nodeid)

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by the number of tests
    return Scheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # xdist keeps this order
        items.sort(key=lambda item: place(item.nodeid))
    large = config.getoption("--large")
    gloo = config.getoption("--backend") == "gloo"
    for item in items:
        if not large and item.get_closest_marker("large"):
            item.add_marker(pytest.mark.skip(reason="needs --large"))
        names = {item.name, getattr(item, "originalname", item.name)} if gloo else set()
        reasons = [gloo_gaps.reason(f"{item.path.name}::{name}") for name in names]
        if reason := next(filter(None, reasons), None):
            item.add_marker(pytest.mark.skip(reason=f"gloo: {reason}"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """The name for init_process_group. Fails if mycoll is not built."""
    name = request.config.getoption("--backend")
    if name == "mycoll":
        try:
            import mycoll

            _ = mycoll.Options  # loads the compiled module
        except (ImportError, OSError) as error:
            pytest.fail(f"{BUILD_HINT}. ({error})", pytrace=False)
    return name


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest, backend: str) -> Iterator[Pool]:
    on_cuda = request.config.getoption("--device") == "cuda"
    options = Options(
        backend=backend,
        deadline=request.config.getoption("--deadline") or (150 if on_cuda else 60),
        native_stacks=request.config.getoption("--native-stacks"),
    )
    pool = Pool(options)
    yield pool
    pool.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, pool: Pool) -> World:
    """A shared world; see pytest_generate_tests."""
    size, transport = request.param
    return pool.get(pool.spec(size, transport))


@pytest.fixture
def device_world(request: pytest.FixtureRequest, pool: Pool) -> World:
    """A shared world in which each rank has a device; the parameter has the path of tensors."""
    size, path = request.param
    return pool.get(pool.spec(size, device=request.config.getoption("--device"), path=path))


@pytest.fixture
def free_port() -> Iterator[int]:
    with ports.free_port() as port:
        yield port


@pytest.fixture
def graphs(request: pytest.FixtureRequest) -> None:
    """For tests of graph capture: skips them if mycoll cannot detect a capture."""
    if request.config.getoption("--device") == "standin" and torch.__version__ < "2.12":
        pytest.skip("before torch 2.12 only CUDA reports that it is being captured")


@pytest.fixture
def standin(request: pytest.FixtureRequest) -> None:
    """For tests that use functions of the stand-in device."""
    if request.config.getoption("--device") != "standin":
        pytest.skip("needs the stand-in device")


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> None:
    """For tests that script the stand-in for NCCL."""
    if not devices.is_scripted(request.config.getoption("--device")):
        pytest.skip("needs the stand-in for NCCL")


@pytest.fixture
def reused_device_world(request: pytest.FixtureRequest, pool: Pool) -> Callable[..., World]:
    """reused_device_world(size, path): like `reused`, with a device for each rank. For tests that
    break their group."""

    def make(size: int, path: str) -> World:
        device = request.config.getoption("--device")
        path = devices.paths(device, size, [path])[0]
        if reason := devices.missing(device, path):
            pytest.skip(reason)
        return pool.get(pool.spec(size, device=device, path=path, init=False))

    return make


@pytest.fixture
def fresh_device_world(request: pytest.FixtureRequest, pool: Pool) -> Iterator:
    """fresh_device_world(size, path, **changes of Spec): like `fresh`, with a device for each rank.
    If ranks share a GPU, NCCL is configured to accept that."""
    made: list[World] = []

    def make(size: int, path: str, **changes) -> World:
        device = request.config.getoption("--device")
        path = devices.paths(device, size, [path])[0]
        if reason := devices.missing(device, path):
            pytest.skip(reason)
        made.append(pool.fresh(pool.spec(size, device=device, path=path, **changes)))
        return made[-1]

    yield make
    for world in made:
        world.kill()


@pytest.fixture
def reused(pool: Pool) -> Callable[..., World]:
    """reused(size, transport, **changes of Spec): a shared world without a group. For tests that
    make or break their own group, but not their processes: see World.run_in_group()."""

    def make(size: int, transport: str = "", **changes: Any) -> World:
        return pool.get(pool.spec(size, transport, init=False, **changes))

    return make


@pytest.fixture
def fresh(pool: Pool) -> Iterator:
    """fresh(size, transport, **changes of Spec): a world that is killed after the test. For tests
    whose processes die or are changed permanently."""
    made: list[World] = []

    def make(size: int, transport: str = "", **changes) -> World:
        made.append(pool.fresh(pool.spec(size, transport, **changes)))
        return made[-1]

    yield make
    for world in made:
        world.kill()


@pytest.fixture
def mycoll_only(backend: str) -> None:
    if backend != "mycoll":
        pytest.skip("specific to mycoll")


@pytest.fixture
def stage(pool: Pool, mycoll_only: None, transport: str) -> Stage:
    """For scenarios in which ranks die, hang or leave."""
    return Stage(pool, transport, SUITE_PATIENCE)
