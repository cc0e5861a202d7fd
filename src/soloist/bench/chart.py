"""A ladder as a picture: one bar per rung, hand-written SVG that needs no library and no fonts of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL, _ROW, _TOP = 760, 220, 34, 46


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One rung."""

    name: str
    tpot_ms: float
    # Below which no machine of this bandwidth can go; None: not known.
    floor_tpot_ms: float | None


def ladder_svg(title: str, bars: Sequence[Bar]) -> str:
    """Draw time per token, rung by rung, with the floor marked in each."""
    longest = max(bar.tpot_ms for bar in bars)
    scale = (_WIDTH - _LABEL - 150) / longest
    height = _TOP + _ROW * len(bars) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' font-family="sans-serif" font-size="13" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="26" font-size="16" fill="#1c1d21">{escape(title)}</text>',
    ]
    for i, bar in enumerate(bars):
        y = _TOP + i * _ROW
        width = bar.tpot_ms * scale
        speedup = f", {bars[0].tpot_ms / bar.tpot_ms:.2f} x" if i else ""
        middle = y + _ROW / 2 + 1
        parts += [
            f'<text x="{_LABEL - 10}" y="{middle}" text-anchor="end" fill="#1c1d21">{escape(bar.name)}</text>',
            f'<rect x="{_LABEL}" y="{y + 5}" width="{width:.1f}" height="{_ROW - 14}" fill="#3b7ddd"/>',
            f'<text x="{_LABEL + width + 8:.1f}" y="{middle}" fill="#1c1d21">{bar.tpot_ms:.3g} ms{speedup}</text>',
        ]
        if bar.floor_tpot_ms is not None:
            x = _LABEL + bar.floor_tpot_ms * scale
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + _ROW - 5}" stroke="#d92d2d" stroke-width="2"/>'
            )
    legend = "ms per token; red: the floor of the bytes a step moves"
    parts.append(f'<text x="{_LABEL}" y="{height - 10}" fill="#6b6e76">{legend}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
