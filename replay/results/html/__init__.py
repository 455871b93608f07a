"""Pages and charts to look at: one HTML file that works offline, or chart images.

A page is made of `Figure` and `layout.Section` values (`page.Page`): `run` makes those of a report, `plan` those
of a capacity plan. Charts are drawn once, when the page is made, as SVG in the text: a page has no script, loads
nothing, and prints. Needs the extra ``html``.
"""

from importlib.util import find_spec

from replay.errors import ReplayError

_missing = [name for name in ("altair", "jinja2", "vl_convert") if find_spec(name) is None]
if _missing:
    raise ReplayError(
        f"pages and charts need {', '.join(_missing)}, not installed here; pip install 'kvcache-replay[html]'"
    )
