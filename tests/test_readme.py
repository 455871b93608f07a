"""What the README shows is what a user sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from replay.cli import main

ROOT = Path(__file__).resolve().parents[1]
RUN_ID = re.compile(r"\d{8}-\d{6}-[a-z0-9]{6}")


def test_the_main_command_prints_what_the_readme_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    shown = text.split("## What it prints")[1].split("```")[1].strip()
    [command] = re.findall(r"\.venv/bin/(replay run \S+ --backend \S+)\n", text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "traces").symlink_to(ROOT / "traces")
    done = CliRunner().invoke(main, [*command.split()[1:], "--target", "sim"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    printed = (done.stderr + done.stdout).strip() if done.stderr not in done.stdout else done.stdout.strip()
    assert RUN_ID.sub("ID", printed).splitlines() == RUN_ID.sub("ID", shown).splitlines()
