#!/usr/bin/env python3
"""Make a virtual environment in .venv-check and run every check and test of BlockTrain in it.

    python3 check.py            everything
    python3 check.py PYTEST...  only pytest, with these arguments (the environment is reused)

Needs Python 3.11 or later, a package registry, and Chromium for the tests of the status page, which is installed where apt-get is there and we are
root. Exits with the first failing check's code.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv-check"
BIN = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")  # as in tests/browsing.py


def run(title: str, *command: str | Path) -> None:
    """Run one check; stop at the first that fails."""
    print(f"== {title}", flush=True)
    began = time.monotonic()
    code = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    print(f"== {title}: {'ok' if code == 0 else f'FAILED ({code})'}, {time.monotonic() - began:.0f} s", flush=True)
    if code:
        sys.exit(code)


def run_tests() -> None:
    """All tests in two halves side by side, since most of them wait for processes: those that kill, and the others."""
    halves = {"faults": ["tests/faults"], "others": ["tests", "--ignore=tests/faults"]}
    began, running = time.monotonic(), {}
    print(f"== tests: {', '.join(halves)}, side by side", flush=True)
    for name, chosen in halves.items():
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (read when the process has ended)
        command = [str(BIN / "python"), "-m", "pytest", "--durations=10", "-p", "no:cacheprovider", *chosen]
        running[name] = output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
    codes = []
    for name, (output, process) in running.items():
        codes.append(process.wait())
        output.seek(0)
        print(f"== tests: {name}\n{output.read()}", flush=True)
        print(f"== tests: {name}: {'ok' if codes[-1] == 0 else f'FAILED ({codes[-1]})'}, {time.monotonic() - began:.0f} s", flush=True)
    if any(codes):
        sys.exit(max(codes))


def make_environment() -> None:
    """Create or refresh the environment when what is installed in it has changed."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()).hexdigest()
    stamp = ENVIRONMENT / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not (BIN / "python").exists():
        venv.create(ENVIRONMENT, with_pip=True)
    run("install", BIN / "python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "-e", ".[dev,wiki,data]")
    stamp.write_text(wanted)


def have_browser() -> bool:
    return any(map(shutil.which, BROWSERS))


def install_ip() -> None:
    """The command by which tests/faults/test_namespace.py makes a network; without it that test shows less, and says so."""
    if shutil.which("ip") is None and shutil.which("apt-get") is not None and hasattr(os, "geteuid") and os.geteuid() == 0:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "iproute2"]):
            subprocess.run(["apt-get", "-qq", *command], stdout=subprocess.DEVNULL, check=False)


def install_browser() -> None:
    """See to it that there is a Chromium before the tests; a second try, since a package mirror may be busy."""
    may = shutil.which("apt-get") is not None and hasattr(os, "geteuid") and os.geteuid() == 0
    for _ in range(2 if may else 0):
        if have_browser():
            return
        print("== browser: apt-get install chromium", flush=True)
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "chromium", "fonts-dejavu-core"]):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", "-qq", *command], env=environment, stdout=subprocess.DEVNULL, check=False)
    if not have_browser():
        sys.exit("check.py: the tests of the status page need Chromium; install it (Debian: apt-get install chromium) and start this again")


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever starts this may have an older one)
        sys.exit("check.py: needs Python 3.11 or later, this is " + sys.version.split()[0])
    make_environment()
    if sys.argv[1:]:
        run("tests", BIN / "python", "-m", "pytest", *sys.argv[1:])
        return
    run("lint", BIN / "ruff", "check", "--quiet", ".")
    run("format", BIN / "ruff", "format", "--check", "--quiet", ".")
    run("floors", BIN / "lint-imports", "--no-cache")
    run("types", BIN / "basedpyright", "--level", "error", "--pythonpath", BIN / "python")
    install_browser()
    install_ip()
    run_tests()


if __name__ == "__main__":
    main()
