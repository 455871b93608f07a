"""Colours and type of pages and charts. Charts are drawn in the light colours; on a page they follow the reader."""

from __future__ import annotations

import re
from typing import Any

COLOURS: dict[str, tuple[str, str]] = {
    "gpu": ("#0b8a6b", "#2fc39b"),
    "cpu": ("#2b7fc9", "#6bb6f6"),
    "disk": ("#8455c4", "#b896f5"),
    "remote": ("#b8478f", "#ee8fca"),
    "external": ("#77782a", "#c2c45c"),
    "unnamed": ("#3d8f8f", "#7fd0d0"),
    "evicted": ("#cf3f0e", "#ff7d50"),
    "lost": ("#b37a00", "#e9b93b"),
    "new": ("#929ca7", "#6a7682"),
    "none": ("#5f6b77", "#97a3af"),
    "computed": ("#7d8894", "#808c98"),
    "unknown": ("#b9c1c9", "#4b5763"),
    "ideal": ("#3a4653", "#c6cfd9"),
    "ink": ("#1a222b", "#e7ecf1"),
    "muted": ("#55606c", "#a6b1bd"),
    "grid": ("#dde2e7", "#2d3742"),
    "surface": ("#fefefe", "#131920"),
    "page": ("#f4f6f8", "#0b0f14"),
    "good": ("#13774a", "#56d09a"),
    "doubt": ("#8f5b00", "#f0b94b"),
    "bad": ("#b3261e", "#ff8a80"),
    "link": ("#1a5fb4", "#85b8ff"),
}
"""Name -> light, dark. No two light colours are equal, so that a drawn colour names its role. Parts stand at 3:1 or
better against the surface (`unknown`, always beside a label, excepted), text at 4.5:1."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_NAMES = {light: name for name, (light, _) in COLOURS.items()}


def colour(name: str) -> str:
    """The light colour of a role; parts without a colour of their own are ``unknown``."""
    return COLOURS.get(name, COLOURS["unknown"])[0]


def variables(scheme: int) -> str:
    """CSS custom properties of the light (0) or dark (1) scheme."""
    return " ".join(f"--{name}: {pair[scheme]};" for name, pair in COLOURS.items())


def follow_reader(svg: str) -> str:
    """A drawn chart whose colours are the page's variables."""

    def variable(match: re.Match[str]) -> str:
        name = _NAMES.get(match[2])
        return f'{match[1]}="var(--{name})"' if name else match[0]

    return re.sub(r'\b(fill|stroke)="(#[0-9a-f]{6})"', variable, svg)


def config() -> dict[str, Any]:
    """Vega-Lite configuration of all charts."""
    muted, ink, grid = colour("muted"), colour("ink"), colour("grid")
    return {
        "aria": False,  # the figure has one description; a role for each mark would only be noise
        "background": None,
        "font": FONT,
        "padding": 4,
        "view": {"stroke": None},
        "axis": {
            "labelColor": muted,
            "titleColor": muted,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "gridColor": grid,
            "domainColor": muted,
            "tickColor": muted,
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": muted,
            "labelFontSize": 12,
            "orient": "top",
            "direction": "horizontal",
            "symbolType": "square",
            "symbolSize": 120,
            "symbolStrokeWidth": 0,
            "columnPadding": 14,
            "rowPadding": 4,
            "title": None,
        },
        "title": {
            "anchor": "start",
            "color": ink,
            "fontSize": 15,
            "fontWeight": 600,
            "subtitleColor": muted,
            "subtitleFontSize": 12,
            "offset": 10,
        },
        "text": {"color": ink, "fontSize": 12},
    }
