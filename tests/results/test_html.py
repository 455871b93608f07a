"""Pages and charts: what stands on them, what is marked, what is left out, and that foreign text stays text."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import replay.results.html
from replay.errors import ReplayError
from replay.results import queries, report
from replay.results.compare import compare
from replay.results.database import open_readable
from replay.results.html import compare as compare_page
from replay.results.html import figure, run, theme
from replay.results.html.page import Page

Write = Callable[..., Path]
Rows = Callable[..., list[dict[str, Any]]]
EVIL = '<img src=x onerror=alert(1)>"\'&{{7*7}}</svg><script>alert(2)</script> fill="#0b8a6b"'


class _Document(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(standard: Path) -> Page:
    return run.page(standard)


@pytest.fixture(scope="module")
def text(page: Page) -> str:
    """The standard page as HTML."""
    return page.html()


def test_a_report_has_every_chart_with_its_table(page: Page) -> None:
    assert [item.name for item in page.items] == ["tokens", "ttft", "time", "sessions", "pauses", "self-check"]
    for item in page.figures:
        assert item.alt.endswith(".")
        assert all(section.rows for section in item.tables)
        assert item.wide.count("<path") > 5


def test_the_page_says_what_the_report_says(text: str, standard: Path) -> None:
    text = _Document(text).text
    result = report.report(standard)
    for said in (
        "lmcache-disk on made_up",
        "112 of 112 requests answered",
        "valid",
        "cache before the run",
        result.run["id"],
    ):
        assert said in text
    for cell in (result.ttft_s["disk"]["p50"], result.ttft_s["gpu"]["p50"]):
        assert f"{cell:.3g}"[:4] in text


def test_a_page_holds_no_script_and_names_nothing_to_load(text: str) -> None:
    document = _Document(text)
    assert not {"script", "iframe", "img", "object", "embed", "base", "form"} & {tag for tag, _ in document.tags}
    assert not [key for _, attributes in document.tags for key in attributes if key.startswith("on")]
    links = [a for _, attributes in document.tags for key, a in attributes.items() if key in ("href", "src") and a]
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text


def test_every_link_of_the_page_leads_somewhere_and_every_id_is_unique(text: str) -> None:
    tags = _Document(text).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [(attributes["href"] or "")[1:] for tag, attributes in tags if tag == "a"]
    labels = [attributes["aria-labelledby"] for _, attributes in tags if "aria-labelledby" in attributes]
    assert links and set(links) | set(labels) <= set(ids)


def test_a_simulated_run_is_marked_on_every_chart_and_a_measured_one_on_none(
    page: Page, text: str, write: Write
) -> None:
    measured = run.page(write(simulated=False, target="launch"))
    assert page.banner and all(item.badge == "simulated" for item in page.figures)
    assert text.count('<span class="badge">simulated</span>') == len(page.figures)
    assert measured.banner is None and "simulated" not in _Document(measured.html()).text.lower()


def test_foreign_text_shows_as_text(write: Write, make_rows: Rows) -> None:
    rows = [{**row, "session": EVIL if row["session"] == "session-1" else row["session"]} for row in make_rows()]
    path = write(rows, name=EVIL, trace=EVIL, model=EVIL, self_check={"warnings": [EVIL], "cache_before": EVIL})
    document = _Document(run.page(path).html())
    assert not {"script", "img"} & {tag for tag, _ in document.tags}
    assert document.text.count("<img src=x onerror=alert(1)>") >= 6
    assert "{{7*7}}" in document.text and 'fill="#0b8a6b"' in document.text
    assert [tag for tag, _ in document.tags].count("svg") == 10


def test_bars_of_the_waterfall_fill_what_could_be_reused(page: Page, standard: Path) -> None:
    result = report.report(standard)
    steps = {step["step"]: step for step in run._steps(result)}
    ideal, prompt = result.tokens["ideal"], result.tokens["prompt"]
    assert (steps["new tokens"]["start"], steps["new tokens"]["end"]) == (ideal, prompt)
    filling = [step for name, step in steps.items() if name not in ("prompts", "new tokens", "reusable")]
    assert [step["start"] for step in filling] == [0, *(step["end"] for step in filling[:-1])]
    assert filling[-1]["end"] == steps["reusable"]["end"] == ideal


def test_stretches_of_time_hold_every_prompt_token_once(standard: Path) -> None:
    with open_readable(standard) as con:
        id = queries.find_run(con, None)
        rows = queries.rows(con, "chart_time", id)
        parts = queries.row(con, "tokens", id)
    assert sum(row["tokens"] for row in rows) == parts["prompt"]
    assert sum(row["tokens"] for row in rows if row["part"] == "disk") == parts["disk"]
    assert all(row["stop"] > row["start"] for row in rows)


def test_a_distribution_is_exact_where_it_has_a_point(standard: Path) -> None:
    with open_readable(standard) as con:
        id = queries.find_run(con, None)
        points = queries.rows(con, "chart_ttft", id)
        times = sorted(t for (t,) in con.execute("SELECT ttft FROM v_requests").fetchall())
    everything = [row for row in points if row["served_from"] == "all"]
    assert [row["ttft"] for row in everything] == times
    assert [row["share"] for row in everything] == [(k + 1) / len(times) for k in range(len(times))]
    assert {row["served_from"]: row["n"] for row in points}["all"] == len(times)


def test_of_many_requests_a_distribution_keeps_about_two_hundred_points(write: Write, make_rows: Rows) -> None:
    with open_readable(write(make_rows(sessions=100))) as con:
        points = queries.rows(con, "chart_ttft", queries.find_run(con, None))
        times = sorted(t for (t,) in con.execute("SELECT ttft FROM v_requests").fetchall())
    everything = [row for row in points if row["served_from"] == "all"]
    assert 200 <= len(everything) <= 202
    for row in everything:
        assert times[round(row["share"] * len(times)) - 1] == row["ttft"]


def test_of_many_sessions_the_worst_and_a_sample_are_shown_and_the_page_says_so(write: Write, make_rows: Rows) -> None:
    path = write(make_rows(sessions=60))
    with open_readable(path) as con:
        rows = queries.rows(con, "chart_sessions", queries.find_run(con, None))
        worst = con.execute(
            "SELECT session FROM v_requests GROUP BY session "
            "ORDER BY sum(loss_total) DESC, max(ttft) DESC, session LIMIT 8"
        ).fetchall()
    lanes = {row["lane"]: (row["session"], row["worst"]) for row in rows}
    assert [lanes[n] for n in range(1, 9)] == [(session, True) for (session,) in worst]
    assert sorted(lanes) == list(range(1, 17)) and not any(lanes[n][1] for n in range(9, 17))
    assert len({session for session, _ in lanes.values()}) == 16
    assert "16 of 60 sessions are shown" in _Document(run.page(path).html()).text


@pytest.mark.parametrize("sessions", [1, 8, 9, 15, 16, 17])
def test_no_session_is_left_out_where_there_are_few(write: Write, make_rows: Rows, sessions: int) -> None:
    with open_readable(write(make_rows(sessions=sessions))) as con:
        rows = queries.rows(con, "chart_sessions", queries.find_run(con, None))
    assert len({row["session"] for row in rows}) == min(sessions, 16)
    assert not re.search(r"\b1 sessions", run._lanes(rows, {}).alt)
    assert sum(row["requests"] for row in rows) == 14 * min(sessions, 16)


def test_evictions_that_an_engine_reports_are_drawn_over_time(standard: Path) -> None:
    rows = [{"start": 0.0, "stop": 5.0, "part": "gpu", "tokens": 4_096, "blocks": 256}]
    with open_readable(standard) as con:
        stretches = queries.rows(con, "chart_time", queries.find_run(con, None))
    assert "Tokens that tiers evicted" in run._time(stretches, rows).wide
    assert "Tokens that tiers evicted" not in run._time(stretches, []).wide


def test_what_is_unknown_is_a_dash_and_never_a_zero(write: Write, make_rows: Rows) -> None:
    names = ["gpu_tokens", "cpu_tokens", "disk_tokens", "computed_tokens", "ideal_tokens", "served_from", "load_s"]
    silent = dict.fromkeys([*names, "recompute_s", *(f"lost_{cause}" for cause in report.LOSSES)])
    page = run.page(write(make_rows(**silent)))
    highlights = {label: value for label, value, _ in page.highlights}
    assert highlights["served from a cache"] == highlights["lost to eviction"] == "-"
    assert [item.name for item in page.items] == ["tokens", "ttft", "time", "sessions", "self-check"]
    assert "unknown" in _Document(page.html()).text


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_without_answers_still_has_a_page(
    write: Write, make_row: Callable[..., dict[str, Any]], rows: int
) -> None:
    failed = {
        **dict.fromkeys(make_row()),
        "session": "s",
        "turn": 0,
        "position": 0,
        "status": "error",
        "error": "refused",
    }
    page = run.page(write([failed] * rows))
    assert [item.name for item in page.items] == ["self-check"]
    assert page.verdict is not None and page.verdict.word == "invalid"
    assert "no request succeeded" in _Document(page.html()).text


def test_one_request_alone_can_be_drawn(write: Write, make_row: Callable[..., dict[str, Any]]) -> None:
    page = run.page(write([make_row()]))
    assert page.html() and [item.name for item in page.figures] == ["tokens", "ttft", "time", "sessions"]


def test_a_page_of_thirty_thousand_requests_is_small_and_soon_made(write: Write, make_rows: Rows) -> None:
    path = write(make_rows(sessions=2_200))
    begin = time.process_time()
    text = run.page(path).html()
    assert time.process_time() - begin < 20  # seconds of CPU; about 2 on one core
    assert len(text) < 500_000


def test_a_comparison_has_a_page_with_its_gates(write: Write, make_rows: Rows) -> None:
    slower = [{**row, "first_token": row["first_token"] + 0.4} for row in make_rows()]
    path = write()
    write(slower, id="b", name="slower")
    found = compare(path, ["lmcache-disk", "slower"], limits=["ttft_p50 <= -25%"])
    page = compare_page.page(path, found)
    assert [item.name for item in page.items] == ["times", "groups", "tokens", "ttft", "turns", "gates"]
    assert page.verdict is not None and (page.verdict.word, page.verdict.tone) == ("failed", "bad")
    assert all(item.badge == "simulated" for item in page.figures)
    assert "ttft_p50 <= -25%" in _Document(page.html()).text


def test_a_comparison_of_several_runs_keeps_them_apart(write: Write) -> None:
    path = write()
    write(id="b", name="b")
    write(id="c", name="c", simulated=False)
    page = compare_page.page(path, compare(path, ["lmcache-disk", "b", "c"]))
    names = [item.name for item in page.items]
    assert len(names) == len(set(names)) and {"times-1", "times-2"} <= set(names)
    assert page.verdict is None
    assert {item.badge for item in page.figures} == {"simulated"}


def test_images_carry_title_and_mark(page: Page, tmp_path: Path) -> None:
    files = figure.save(page.figures, "svg", tmp_path / "new" / "charts", page.mark)
    assert [file.name for file in files] == [f"{item.name}.svg" for item in page.figures]
    for file, item in zip(files, page.figures, strict=True):
        text = file.read_text("utf-8")
        assert item.title in text and "SIMULATED" in text and "var(" not in text
    (png,) = figure.save(page.figures, "png", tmp_path / "one.png", page.mark, only="tokens")
    assert png == tmp_path / "one.png" and png.read_bytes().startswith(b"\x89PNG")


def test_an_unknown_chart_or_a_folder_that_cannot_be_made_is_one_line(page: Page, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="unknown chart 'token'; nearest: tokens"):
        figure.save(page.figures, "svg", tmp_path, page.mark, only="token")
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match="file: cannot write"):
        figure.save(page.figures, "svg", tmp_path / "file", page.mark)


def test_a_missing_library_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ReplayError, match=r"altair, jinja2, vl_convert.*pip install 'kvcache-replay\[html\]'"):
            importlib.reload(replay.results.html)
    importlib.reload(replay.results.html)


def test_only_colours_of_a_drawing_become_the_pages() -> None:
    drawn = theme.follow_reader('<path fill="#0b8a6b" stroke="#123456" d="#0b8a6b"/>')
    assert drawn == '<path fill="var(--gpu)" stroke="#123456" d="#0b8a6b"/>'
    lights = [light for light, _ in theme.COLOURS.values()]
    assert len(lights) == len(set(lights))


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_and_marks_stand_out_from_what_is_behind_them(scheme: int) -> None:
    texts = ("ink", "muted", "link", "good", "doubt", "bad")
    marks = ("gpu", "cpu", "disk", "remote", "external", "evicted", "lost", "none", "computed", "ideal")
    for behind in ("surface", "page"):
        for name in texts:
            assert _contrast(theme.COLOURS[name][scheme], theme.COLOURS[behind][scheme]) >= 4.5, name
    for name in marks:
        assert _contrast(theme.COLOURS[name][scheme], theme.COLOURS["surface"][scheme]) >= 3, name


def _contrast(one: str, other: str) -> float:
    """Ratio of WCAG 2.1."""
    lights = []
    for colour in (one, other):
        channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        lights.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)
