"""What the documents promise is run: commands exist, settings are described, links lead somewhere, names are right."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain import cli
from blocktrain.config import RunConfig, make_config, merge_fields, parse_assignment, preset_fields, settings_markdown

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def shell_lines() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", "".join(page.read_text() for page in PAGES), re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_settings_page_is_the_code():
    assert (ROOT / "docs" / "settings.md").read_text() == settings_markdown(), "run: python -c 'from blocktrain.config import settings_markdown; ...'"


def test_every_setting_is_described():
    for _, section in RunConfig():
        for name, field in getattr(type(section), "model_fields", {}).items():
            assert field.description, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_every_command_in_the_documents_parses(capsys: pytest.CaptureFixture[str]):
    """Each `blocktrain ...` line binds to a command with exactly these flags; its settings pass the checks."""
    commands = [part.strip() for line in shell_lines() for part in line.split("&&") if part.strip().startswith("blocktrain ")]
    assert len(commands) >= 5
    for text in commands:
        tokens = shlex.split(text)[1:]
        cli.app.parse_args(tokens, exit_on_error=False, print_error=False)
        sets = [tokens[i + 1] for i, token in enumerate(tokens) if token == "--set"]
        fields = preset_fields(tokens[tokens.index("--preset") + 1]) if "--preset" in tokens else {}
        for one in sets:
            fields = merge_fields(fields, parse_assignment(one))
        make_config(fields, text)


SHORTER = ["--set=train.steps=2", "--set=evaluate.windows=2", "--set=train.batch_size=2", "--set=evaluate.noise_draws=2"]


def run_with_one_worker(tokens: list[str], folder: Path) -> None:
    """A coordinator as the README starts it, but for port and length, and a worker by the line that it prints, both to the end."""
    tokens[tokens.index("--listen") + 1] = "127.0.0.1:0"
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "blocktrain"]
    with subprocess.Popen([*start, *tokens, *SHORTER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as coordinator:
        assert coordinator.stdout is not None
        line = shlex.split(coordinator.stdout.readline())
        assert line[:2] == ["blocktrain", "worker"]
        worker = subprocess.run([*start, *line[1:]], capture_output=True, text=True, env=environment, timeout=300, check=False)
        assert worker.returncode == 0, worker.stderr
        assert "the run is finished" in worker.stderr
        said, noted = coordinator.communicate(timeout=120)
        assert coordinator.returncode == 0, noted
        assert "finished" in said


class Hosts:
    """Commands of the README that keep running, on ports that are free here; the commands after them are given those ports."""

    def __init__(self) -> None:
        self.ports: dict[str, str] = {}
        self.running: list[subprocess.Popen[str]] = []

    def moved(self, tokens: list[str]) -> list[str]:
        for stated, port in self.ports.items():
            tokens = [token.replace(stated, port) for token in tokens]
        return tokens

    def start(self, tokens: list[str]) -> None:
        """Until it says where it listens."""
        at = tokens.index("--listen") + 1
        stated, tokens[at] = tokens[at], "127.0.0.1:0"
        command = [sys.executable, "-m", "blocktrain", *self.moved(tokens)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self.running.append(process)
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"127\.0\.0\.1:\d+", line):
                self.ports[stated] = found[0]
                return
        pytest.fail(f"{tokens[0]} ended: {said}")

    def end(self) -> None:
        for process in self.running:
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            assert process.wait(timeout=30) == 0
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.end()


def test_the_readme_commands_work_one_after_another(
    tmp_path: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every blocktrain command of the README, in its order, in one folder; only the training is shortened."""
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = [part.strip() for line in "".join(lines).splitlines() for part in line.split("&&") if part.strip().startswith("blocktrain ")]
    assert len(commands) >= 5
    for text in commands:
        tokens = shlex.split(text)[1:]
        if tokens[0] == "train":
            tokens += SHORTER
        if tokens[0] == "coordinator" and "--status" not in tokens:
            run_with_one_worker(tokens, tmp_path)
            continue
        if tokens[0] in ("stage", "serve"):
            hosts.start(tokens)
            continue
        assert cli.run(hosts.moved(tokens)) == 0, (text, capsys.readouterr().err)
    out = capsys.readouterr().out
    assert "headline CE" in out
    assert "worker / end-to-end" in out


def test_the_check_command_is_the_one_that_ci_runs():
    assert "python3 check.py" in shell_lines()
    assert "python3 check.py" in (ROOT / ".ci" / "run").read_text()


def test_files_named_in_the_documents_exist():
    for page in PAGES:
        for name in re.findall(r"`((?:src|tests|benchmarks|docs)/[\w./-]+)`", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
