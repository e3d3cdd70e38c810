"""The program is pure Python, needs only what it declares, and loads where the system is not a Unix."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from blocktrain.streams import FileSource

ROOT = Path(__file__).parents[2]
UNIX_ONLY = ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "readline", "curses", "uvloop", "syslog", "posix")

AS_ELSEWHERE = """
import builtins, importlib, os, pkgutil, signal, sys
import torch, numpy, pydantic, cyclopts, fastapi, uvicorn, httpx2, sqlalchemy, obstore, cryptography, limits, filelock, plotly, prometheus_client
import uvicorn.protocols.http.httptools_impl
real = builtins.__import__
def lacking(name, globals=None, *more):
    if (globals or {}).get("__name__", "").startswith("blocktrain") and name in UNIX_ONLY:
        raise ImportError(f"no {name} here")
    return real(name, globals, *more)
builtins.__import__ = lacking
for name in ("pread", "pwrite", "sysconf", "sched_getaffinity", "geteuid", "getuid", "fork", "nice", "preadv"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1"):
    delattr(signal, name)
import blocktrain
for module in pkgutil.walk_packages(blocktrain.__path__, "blocktrain."):
    if module.name != "blocktrain.__main__":
        importlib.import_module(module.name)
from pathlib import Path
from blocktrain.streams import FileSource
source = FileSource(Path(sys.argv[1]))
assert source.read(2, 5) == b"cde" and source.read(0, 10) == b"abcdefghij", "reading without pread"
from blocktrain.swarm import crash
from blocktrain.swarm.host import steady_memory
crash.point("join.before_record")
steady_memory()
print("loaded")
"""


def test_every_module_loads_without_what_only_unix_has(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"abcdefghij")
    code = f"UNIX_ONLY = {UNIX_ONLY}\n{AS_ELSEWHERE}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True, check=False)
    assert done.stdout == "loaded\n", done.stderr


def test_a_file_is_read_the_same_without_pread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    source = FileSource(tmp_path / "file")
    with_it = [source.read(start, stop) for start, stop in ((90, 100), (0, 100), (5, 5), (17, 18))]
    monkeypatch.delattr(os, "pread", raising=False)
    assert [source.read(start, stop) for start, stop in ((90, 100), (0, 100), (5, 5), (17, 18))] == with_it


def _imported() -> set[str]:
    """Top-level names that the source imports anywhere."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"blocktrain"}


SYSTEMS = (("linux", "Linux", "posix"), ("darwin", "Darwin", "posix"), ("win32", "Windows", "nt"))


def _needed(texts: Iterable[str]) -> set[str]:
    """Names of what is needed on all three systems."""
    found = set()
    for requirement in map(Requirement, texts):
        environments = [{"sys_platform": p, "platform_system": s, "os_name": o, "extra": ""} for p, s, o in SYSTEMS]
        if requirement.marker is None or all(requirement.marker.evaluate(one) for one in environments):
            found.add(canonicalize_name(requirement.name))
    return found


def test_every_import_is_declared_for_every_system():
    """By us, or by something that we declare."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["data"], *project["optional-dependencies"]["report"]]
    known = _needed(declared)
    assert len(known) == len(declared)
    for _ in range(2):
        known |= {other for one in known for other in _needed(metadata.requires(one) or [])}
    owners = metadata.packages_distributions()
    assert {name for name in _imported() if not {canonicalize_name(one) for one in owners.get(name, [])} & known} == set()
    assert "uvloop" not in _imported()


def test_the_wheel_is_pure_python_and_has_the_page(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]
    source = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert source <= set(names)
