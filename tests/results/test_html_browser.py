"""Pages in a headless Chromium: nothing complains, nothing is loaded, every chart is drawn on every screen."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.backends import preset
from replay.engine import profiles
from replay.plan import Slo, plan
from replay.plan.page import page as plan_page
from replay.results.compare import compare
from replay.results.html import compare as compare_page
from replay.results.html import run, theme
from replay.trace import Trace
from replay.trace.synth import generate


def _load(name: str) -> Any:
    """A helper that stands beside this file (tests are no package)."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


browser = _load("browser")
pytestmark = pytest.mark.skipif(browser.BINARY is None, reason="no Chromium here; apt-get install chromium")

EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
LOOK = """(() => {
  const box = node => node.getBoundingClientRect();
  const painted = svg => [...svg.querySelectorAll('path, line, rect')].filter(mark => {
    const style = getComputedStyle(mark), size = box(mark);
    const colour = style.fill !== 'none' ? style.fill : style.stroke;
    return colour !== 'none' && colour !== 'rgb(0, 0, 0)' && size.width + size.height > 0;
  });
  const figures = [...document.querySelectorAll('figure')].map(figure => {
    const shown = [...figure.querySelectorAll('svg')].filter(svg => box(svg).width > 0);
    return {
      drawings: shown.length,
      marks: painted(shown[0]).length,
      width: box(shown[0]).width,
      outside: [...shown[0].querySelectorAll('text')].filter(text => box(text).right > innerWidth || box(text).left < 0)
        .map(text => text.textContent),
      smallest: Math.min(...[...shown[0].querySelectorAll('text')].map(text => box(text).height)),
      label: shown[0].parentElement.getAttribute('aria-label'),
      table: figure.parentElement.querySelectorAll('details table tbody tr').length,
    };
  });
  return {
    figures,
    overflow: document.documentElement.scrollWidth - innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
    text: document.body.textContent,
    elements: document.querySelectorAll('img, script, iframe, object').length,
    landmarks: ['header', 'main', 'nav', 'footer'].map(name => document.querySelectorAll(name).length),
    headings: [...document.querySelectorAll('h1, h2, h3')].map(heading => +heading.tagName[1]),
  };
})()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, make_rows: Callable[..., list[dict[str, Any]]]) -> dict[str, Path]:
    """A page of each kind, written to a file."""
    folder = tmp_path_factory.mktemp("pages")
    file = folder / "results.duckdb"
    rows = [
        {**row, "session": EVIL if row["session"] == "session-3" else row["session"]} for row in make_rows(sessions=30)
    ]
    slower = [{**row, "first_token": row["first_token"] + 0.05} for row in rows]
    for name, chosen in (("first", rows), ("second", slower)):
        _write(file, chosen, name)
    header, turns = generate("claude-code", 3, 1)
    backends = [preset.load(name) for name in ("vllm", "lmcache-cpu", "lmcache-disk")]
    planned = plan(
        Trace(header, list(turns)),
        profiles.model("qwen2.5-7b-1m"),
        profiles.gpu("h200"),
        backends,
        slo=Slo("ttft_p95", 2.0),
        simulate=lambda choice: {"ttft_p50": 0.2, "ttft_p95": 1.0 + len(choice.name) / 5},
    )
    made = {
        "run": run.page(file, "first"),
        "compare": compare_page.page(file, compare(file, ["first", "second"], limits=["ttft_p50 <= -25%"])),
        "plan": plan_page(planned),
    }
    for name, page in made.items():
        (folder / f"{name}.html").write_text(page.html(), "utf-8")
    return {name: folder / f"{name}.html" for name in made}


def _write(file: Path, rows: list[dict[str, Any]], name: str) -> None:
    from replay.results import Store

    with Store.create_or_open(file) as store:
        about = {"backend": "lmcache-disk", "target": "sim", "simulated": True, "trace": EVIL, "model": "m", "gpu": "g"}
        id = store.begin_run({**about, "name": name, "settings": {"kv_bytes_per_token": 147_456}})
        for row in rows:
            store.add(row, run_id=id)
        store.finish_run(id, duration_s=max(row["closed"] for row in rows))


def _visit(path: Path, width: int, dark: bool) -> tuple[dict[str, Any], list[str], list[str]]:
    """What stands on a page, what it asked for, and what the browser complained about."""

    async def visit() -> tuple[dict[str, Any], list[str], list[str]]:
        async with browser.tab() as tab:
            await tab.open(path, width=width, dark=dark)
            return await tab.evaluate(LOOK), tab.requests, tab.complaints

    return asyncio.run(visit())


@pytest.mark.parametrize(
    ("kind", "width", "dark"),
    [(kind, *screen) for kind in ("run", "compare", "plan") for screen in ((1100, False), (390, True))],
)
def test_a_page_is_whole_on_every_screen(pages: dict[str, Path], kind: str, width: int, dark: bool) -> None:
    seen, requests, complaints = _visit(pages[kind], width, dark)
    assert complaints == []
    assert set(requests) - {"data:,"} == {pages[kind].as_uri()}
    assert seen["overflow"] <= 0
    assert seen["background"] == _rgb(theme.COLOURS["page"][dark])
    assert seen["elements"] == 0
    assert seen["landmarks"] == [1, 1, 1, 1]
    assert seen["headings"][0] == 1 and set(seen["headings"][1:]) <= {2, 3}
    assert len(seen["figures"]) >= 3
    for figure in seen["figures"]:
        assert figure["drawings"] == 1 and figure["marks"] >= 4, figure
        assert 280 <= figure["width"] <= width and not figure["outside"] and figure["smallest"] >= 11, figure
        assert len(figure["label"]) > 40 and figure["table"] >= 2, figure


def test_markup_in_a_session_id_shows_as_text(pages: dict[str, Path]) -> None:
    for kind in ("run", "compare"):
        seen, _, complaints = _visit(pages[kind], 1100, dark=False)
        assert EVIL in seen["text"] and seen["elements"] == 0 and complaints == []


def test_marks_take_the_colours_of_the_readers_scheme(pages: dict[str, Path]) -> None:
    find = "getComputedStyle(document.querySelector('#tokens .wide path[fill=\"var(--gpu)\"]')).fill"

    async def colours() -> list[str]:
        found = []
        async with browser.tab() as tab:
            for dark in (False, True):
                await tab.open(pages["run"], dark=dark)
                found.append(await tab.evaluate(find))
        return found

    assert asyncio.run(colours()) == [_rgb(colour) for colour in theme.COLOURS["gpu"]]


def test_the_keyboard_reaches_links_and_opens_tables(pages: dict[str, Path]) -> None:
    async def walk() -> tuple[str, bool, bool]:
        async with browser.tab() as tab:
            await tab.open(pages["run"])
            await _press(tab, "Tab", 9)
            first = await tab.evaluate("document.activeElement.textContent")
            before = await tab.evaluate("document.querySelector('#ttft details').open")
            await tab.evaluate("document.querySelector('#ttft summary').focus()")
            await _press(tab, "Enter", 13)
            return first, before, await tab.evaluate("document.querySelector('#ttft details').open")

    assert asyncio.run(walk()) == ("Skip to the charts", False, True)


def test_on_paper_a_dark_page_is_light_and_its_tables_are_open(pages: dict[str, Path]) -> None:
    async def printed() -> tuple[str, float]:
        async with browser.tab() as tab:
            await tab.open(pages["run"], dark=True)
            await tab.call(
                "Emulation.setEmulatedMedia",
                media="print",
                features=[{"name": "prefers-color-scheme", "value": "dark"}],
            )
            ink = await tab.evaluate("getComputedStyle(document.body).color")
            return ink, await tab.evaluate(
                "document.querySelector('#ttft details table').getBoundingClientRect().height"
            )

    ink, height = asyncio.run(printed())
    assert ink == _rgb(theme.COLOURS["ink"][0])
    assert height > 50


async def _press(tab: Any, key: str, code: int) -> None:
    typed = {"text": "\r"} if key == "Enter" else {}
    await tab.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **typed)
    await tab.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))})"
