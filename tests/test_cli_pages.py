"""Pages, images, Parquet and merged files from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from replay.cli import main
from replay.results import open_results

TRACE = "\n".join(
    [
        '{"format":"replay-trace","version":1,"name":"t"}',
        *(
            f'{{"session":"s{n}","turn":0,"at":{n},"append":[["tools",2048],["{n}",1000]],"output":20}}\n'
            f'{{"session":"s{n}","turn":1,"pause":2,"append":[["more {n}",300]],"output":20}}'
            for n in range(3)
        ),
    ]
)


def replay(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], catch_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace, and a results file with two simulated runs of it."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "t.jsonl").write_text(TRACE + "\n")
    for backend in ("vllm", "lmcache-cpu"):
        arguments = ("--backend", backend, "--target", "sim", "--model", "qwen3-8b", "--gpu", "h100")
        assert replay("run", folder / "t.jsonl", *arguments, "--db", folder / "r.duckdb").exit_code == 0
    return folder


def test_a_report_becomes_a_page(folder: Path, tmp_path: Path) -> None:
    assert replay("report", "--db", folder / "r.duckdb", "--format", "html", "-o", tmp_path / "r.html").exit_code == 0
    text = (tmp_path / "r.html").read_text("utf-8")
    assert text.startswith("<!DOCTYPE html>") and "lmcache-cpu on t" in text
    assert replay("report", "vllm", "--db", folder / "r.duckdb", "--format", "html").stdout.startswith(
        "<!DOCTYPE html>"
    )


def test_a_report_becomes_images(folder: Path, tmp_path: Path) -> None:
    result = replay("report", "--db", folder / "r.duckdb", "--format", "svg", "-o", tmp_path / "charts")
    assert result.exit_code == 0 and "tokens.svg" in result.stderr
    assert {"tokens.svg", "ttft.svg", "time.svg", "sessions.svg"} <= {
        file.name for file in (tmp_path / "charts").iterdir()
    }
    one = ("report", "--db", folder / "r.duckdb", "--format", "png", "--chart", "ttft", "-o", tmp_path / "one.png")
    assert replay(*one).exit_code == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--format", "png"), "name a folder for them with -o"),
        (("--format", "svg", "--chart", "x", "-o", "charts"), "unknown chart 'x'"),
        (("--format", "png", "-o", "p.png"), "p.png: 5 charts for one file; name a folder, or pick one of tokens"),
        (("--format", "png", "--chart", "ttft", "-o", "p.svg"), "the images are png; name a .png file, or a folder"),
        (("--format", "html", "--chart", "ttft"), "use it with --format png or svg"),
        (("--format", "html", "-o", "/nowhere/r.html"), "/nowhere/r.html: cannot write: no such file or directory"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = replay("report", "--db", folder / "r.duckdb", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert said in result.stderr and result.stderr.count("\n") == 1


def test_a_comparison_becomes_a_page_and_its_gates_still_decide(folder: Path, tmp_path: Path) -> None:
    arguments = (
        "compare",
        "vllm",
        "lmcache-cpu",
        "--db",
        folder / "r.duckdb",
        "--format",
        "html",
        "-o",
        tmp_path / "c.html",
    )
    assert replay(*arguments).exit_code == 0
    assert replay(*arguments, "--gate", "ttft_p50 <= -99%").exit_code == 1
    text = (tmp_path / "c.html").read_text("utf-8")
    assert "lmcache-cpu against vllm" in text and "failed" in text
    written = replay("compare", "vllm", "lmcache-cpu", "--db", folder / "r.duckdb", "-o", tmp_path / "c.txt")
    assert written.stdout == "" and "Time in seconds" in (tmp_path / "c.txt").read_text("utf-8")


def test_a_plan_becomes_a_page(folder: Path, tmp_path: Path) -> None:
    arguments = ("plan", folder / "t.jsonl", "--backend", "vllm", "--backend", "lmcache-cpu", "--format", "html")
    assert replay(*arguments, "-o", tmp_path / "p.html").exit_code == 0
    text = (tmp_path / "p.html").read_text("utf-8")
    assert "Hits by capacity" in text and "Predicted time to first token" in text


def test_results_go_to_parquet_and_into_one_file(folder: Path, tmp_path: Path) -> None:
    exported = replay("export", "vllm", "--db", folder / "r.duckdb", "-o", tmp_path / "parquet")
    assert exported.exit_code == 0 and "requests.parquet: 6 rows" in exported.stderr
    merged = replay("merge", folder / "r.duckdb", "-o", tmp_path / "all.duckdb")
    assert merged.exit_code == 0 and "2 runs added, 0 there already" in merged.stderr
    with open_results(tmp_path / "all.duckdb") as results:
        assert results.requests.shape[0] == 12
    replay("run", folder / "t.jsonl", "--backend", "vllm", "--target", "sim", "--db", tmp_path / "one.duckdb")
    single = replay("merge", tmp_path / "one.duckdb", "-o", tmp_path / "all.duckdb")
    assert single.exit_code == 0 and "1 run added, 0 there already" in single.stderr
    itself = replay("merge", folder / "r.duckdb", "-o", folder / "r.duckdb")
    assert itself.exit_code == 2 and "cannot be merged into itself" in itself.stderr
