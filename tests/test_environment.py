"""Environment variables: the documented ones are those of the code; their values and errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mycoll import __main__ as command_line
from worlds import warm
from worlds.worker import Ctx

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/environment.md"
CODE = [
    path
    for folder, suffixes in [("csrc", {".h", ".cpp", ".inc"}), ("python/mycoll", {".py", ".pyi"})]
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in suffixes
]
VARIABLE = re.compile(r"\bMYCOLL_[A-Z0-9]+(?:_[A-Z0-9]+)*\b")


def documented() -> set[str]:
    return set(re.findall(r"^\| `(MYCOLL_\w+)` \|", PAGE.read_text(), re.MULTILINE))


def test_table_is_documented() -> None:
    table = (ROOT / "csrc/base/env.cpp").read_text()
    assert set(re.findall(r'^\s*\{"(MYCOLL_\w+)"', table, re.MULTILINE)) == documented()


def test_names_in_the_code_are_documented() -> None:
    """This includes names in messages and comments, where a misspelling would mislead users."""
    texts = {path: path.read_text() for path in CODE}
    macros = {
        name
        for text in texts.values()
        for name in re.findall(r"^\s*#\s*(?:define|ifn?def)\s+(MYCOLL_\w+)", text, re.MULTILINE)
    }
    for path, text in texts.items():
        unknown = set(VARIABLE.findall(text)) - macros - documented()
        assert not unknown, f"{path.relative_to(ROOT)} names {unknown}"


def test_only_the_table_reads_them() -> None:
    for path in CODE:
        if path.name != "env.cpp":
            assert not re.search(r'(getenv|environ\W.{0,9})\(?"MYCOLL_', path.read_text()), path


@pytest.mark.tools
@pytest.mark.parametrize("verb", ["env", "version"])
def test_a_reader_that_goes_away(verb: str) -> None:
    """As in `mycoll env | head -1`: no traceback, and the exit code of SIGPIPE."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "mycoll", verb],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(60) == 128 + signal.SIGPIPE


@pytest.mark.tools
@pytest.mark.parametrize(("where", "code"), [("> /dev/full", 2), (">&-", 0)])
def test_output_that_cannot_be_written(where: str, code: int) -> None:
    command = f"{sys.executable} -m mycoll env {where}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == (code == 2)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"mycoll [\d.]+\S*\n", capsys.readouterr().out)


def test_help_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {verb} " in shown for verb in command_line.known_verbs())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dcotor"], "mycoll: unknown verb 'dcotor'; did you mean doctor?"),
        (["env", "--nonsense"], "mycoll env: unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments_come_before_the_usage(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command_line.main(words)
    assert end.value.code == 2
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == message and second.startswith("usage: mycoll")


def test_what_differs_from_the_default() -> None:
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MYCOLL_")}

    def marked(**variables: str) -> list[str]:
        code = "from mycoll.__main__ import main; raise SystemExit(main(['env']))"
        run = warm.start(code, environment=plain | variables)
        out, error = run.communicate(timeout=60)
        assert run.returncode == 0, error
        return [line for line in out.splitlines() if "(default: " in line or "know" in line]

    assert not marked()
    lines = marked(MYCOLL_SMALL_BYTES="1K", MYCOLL_TRANSPROT="tcp")
    assert lines[0].startswith("MYCOLL_SMALL_BYTES=1K  (default: ")
    assert lines[-1].endswith("did you mean MYCOLL_TRANSPORT?") and len(lines) == 2


def test_variables_fit_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    assert command_line.main(["env"]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def warned(ctx: Ctx) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ctx.init()
        dist.new_group()
    return [str(each.message) for each in seen if "MYCOLL" in str(each.message)]


def test_misspelt_names_are_warned_about(fresh) -> None:
    """One rank of a host warns."""
    env = {"MYCOLL_TRANSPROT": "tcp", "MYCOLL_UNHEARD_OF": "1", "MYCOLL_TRACE_FILE": "off"}
    warnings_of_ranks = fresh(2, "shm", init=False, env=env).run(warned)
    assert warnings_of_ranks[0] == [
        "MYCOLL_TRANSPROT is not a variable of mycoll's; did you mean MYCOLL_TRANSPORT?",
        "MYCOLL_UNHEARD_OF is not a variable of mycoll's; `mycoll env` lists all",
    ]


NONSENSE = "%n /:"  # no value of any variable but a path


@pytest.mark.tools
@pytest.mark.parametrize(
    ("replace", "cpu"), [(NONSENSE, NONSENSE), ("gloo", NONSENSE), ("gloo", "gloo"), ("gloo", "")]
)
def test_torch_can_be_imported_with_any_value(mycoll_only, replace: str, cpu: str) -> None:
    """Nothing is printed, even if warnings are errors. The compiled module is loaded only to
    replace gloo."""
    environment = {**os.environ, **dict.fromkeys(documented(), NONSENSE)}
    environment |= {"MYCOLL_REPLACE": replace, "MYCOLL_CPU": cpu}
    code = f"""
import sys, torch
assert torch.ones(2).sum() == 2 and "mycoll._registration" in sys.modules
assert ("mycoll._C" in sys.modules) == {replace == "gloo" != cpu}
import mycoll
"""
    command = [sys.executable, "-W", "error::UserWarning", "-W", "error:::mycoll", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nonsense_is_an_error_of_the_group(mycoll_only) -> None:
    """The error names the variable and its valid values. The next group uses the corrected
    value."""
    page = PAGE.read_text()
    paths = set(re.findall(r"^\| `(MYCOLL_\w+)` \|.* Accepts a path\. \|", page, re.MULTILINE))
    names = sorted(documented() - paths)
    assert len(names) > 20
    program = f"""
import os, torch.distributed as dist
def init():
    dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
for name in {names}:
    os.environ[name] = {NONSENSE!r}
    try:
        init()
    except ValueError as error:
        assert name + "={NONSENSE} is not valid: expected " in str(error), error
    else:
        raise AssertionError(name + " is accepted")
    del os.environ[name]
init()
"""
    run = warm.start(program, environment=dict(os.environ))
    _, error = run.communicate(timeout=60)
    assert run.returncode == 0, error


def test_where_values_come_from() -> None:
    """Values are read once: later changes by the program have no effect."""
    pytest.importorskip("mycoll._C", reason="mycoll is not built", exc_type=ImportError)
    program = """
import json, os, torch
from mycoll import _C
_C.environment()
os.environ["MYCOLL_SMALL_BYTES"] = "2K"
print(json.dumps(_C.environment()))
"""
    environment = {**os.environ, "MYCOLL_SMALL_BYTES": "1K", "TORCH_FR_BUFFER_SIZE": "64"}
    out, _ = warm.start(program, environment=environment).communicate(timeout=60)
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["MYCOLL_SMALL_BYTES"]["value"] == "1K"
    assert rows["MYCOLL_SMALL_BYTES"]["source"] == "MYCOLL_SMALL_BYTES"
    assert rows["MYCOLL_SMALL_BYTES"]["is_set"]
    assert rows["MYCOLL_TRACE_ENTRIES"]["source"] == "TORCH_FR_BUFFER_SIZE"
    assert rows["MYCOLL_TRACE_ENTRIES"]["value"] == "64"
    assert rows["MYCOLL_CHUNK_BYTES"]["source"] == "default"


def test_pythons_logging_can_carry_the_lines(backend) -> None:
    """In its own process, because the engine's log belongs to the process."""
    if backend != "mycoll":
        pytest.skip("specific to mycoll")
    program = """
import logging, sys
import mycoll, torch.distributed as dist
form = "%(name)s %(levelname)s %(message)s"
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, format=form)
if sys.argv[1:]:
    mycoll.log_to_python(logging.DEBUG)
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""
    env = {**os.environ, "MYCOLL_LOG": "debug"}
    env.pop("MYCOLL_CPU", None)
    for argument in ("", "python"):
        run = warm.start(program, *filter(None, [argument]), environment=env)
        out, error = run.communicate(timeout=60)
        assert run.returncode == 0, error
        assert re.search(r"^mycoll INFO mycoll \S+: group '0', rank 0 of 1", out, re.M)
        lines = re.findall(r"^mycoll INFO listening on", out, re.M)
        assert ("[mycoll " in error) == (not argument), error
        assert bool(lines) == bool(argument), out


def test_a_forked_child_does_not_use_the_log(backend) -> None:
    if backend != "mycoll":
        pytest.skip("specific to mycoll")
    program = """
import logging, os, sys
import mycoll, torch.distributed as dist
logging.basicConfig(stream=sys.stdout, level=logging.DEBUG)
mycoll.log_to_python(logging.DEBUG)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
dist.destroy_process_group()
"""
    environment = {name: value for name, value in os.environ.items() if name != "MYCOLL_CPU"}
    run = warm.start(program, environment=environment, to_the_end=True)
    out, error = run.communicate(timeout=60)
    assert run.returncode == 0 and "BrokenPipe" not in error, error
    assert "listening on" in out, out


def test_a_handler_that_raises_loses_one_line(backend) -> None:
    if backend != "mycoll":
        pytest.skip("specific to mycoll")
    program = """
import logging, mycoll, torch.distributed as dist
import torch
class Handler(logging.Handler):
    def emit(self, record):
        text = record.getMessage()
        if "operation 0" in text:
            raise KeyError("my handler is wrong")
        print(text, flush=True)
logging.getLogger("mycoll").addHandler(Handler())
mycoll.log_to_python(logging.ERROR)
dist.init_process_group("mycoll", store=dist.HashStore(), rank=0, world_size=1)
dist.group.WORLD._register_on_completion_hook(lambda info: 1 / 0)
for _ in range(3):
    dist.all_reduce(torch.ones(1))
    dist.group.WORLD._wait_for_pending_works()
dist.destroy_process_group()
"""
    env = {**os.environ}
    env.pop("MYCOLL_CPU", None)
    run = warm.start(program, environment=env)
    out, error = run.communicate(timeout=60)
    assert run.returncode == 0, error
    assert "my handler is wrong" in error
    assert re.findall("operation [0-9]", out) == ["operation 1", "operation 2"], (out, error)


def test_versions_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["version"]) == 0
    line = capsys.readouterr().out
    assert command_line.main(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] is None
    assert found["torch"] == torch.__version__
    assert line == f"mycoll {found['mycoll']}, torch {found['torch']}, Python {found['python']}\n"
