"""Reports of result files: Markdown, an SVG for a page, and one HTML file that needs no network.

The figures are matplotlib's, as SVG inside the page; it has no script. A figure for which the
rows have nothing (no limit, one column only) is left out.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from graft.bench import cells, results, tables
from graft.errors import GraftError

_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2")
_RATIOS_MIN = 3  # points that make a curve
_HEAT_MIN = 12  # points that make a heat map worth drawing
_COLUMN_MIN = 3  # row counts that make a line


@dataclass(frozen=True)
class Figure:
    """A plot with its title; `svg` is an element to stand inside HTML."""

    title: str
    caption: str
    svg: str


def markdown(files: Sequence[tuple[str, results.Result]]) -> str:
    """Each file's provenance, a summary by case, and every row."""
    parts = []
    for name, result in files:
        labels = present(result)
        parts += [f"## {name}", "", *(f"- {line}" for line in provenance(result)), ""]
        if result["rows"]:
            if len({(row["case"], row["dtype"]) for row in result["rows"]}) < len(result["rows"]):
                parts += [tables.by_case(result["rows"], labels), ""]
            parts += [tables.by_row(result["rows"], labels), ""]
        failures = errors(result)
        if failures:
            parts += ["Failed:", "", *(f"- {line}" for line in failures), ""]
    return "\n".join(parts).rstrip() + "\n"


def html(files: Sequence[tuple[str, results.Result]]) -> str:
    """One self-contained page. Raises GraftError when jinja2 or matplotlib is not installed."""
    jinja2 = _need("jinja2")
    source = Path(__file__).with_name("report.html.j2").read_text()
    sections = [
        {
            "name": name,
            "provenance": provenance(result),
            "summary": _cells(tables.by_case(result["rows"], present(result))),
            "figures": _apart(figures(result), f"f{number}"),
            "rows": _cells(tables.by_row(result["rows"], present(result))),
            "errors": errors(result),
        }
        for number, (name, result) in enumerate(files)
        if result["rows"]
    ]
    template = jinja2.Environment(autoescape=True).from_string(source)
    return str(template.render(sections=sections))


def svg(files: Sequence[tuple[str, results.Result]]) -> str:
    """The sorted ratios of the first file, as a file of its own."""
    name, result = files[0]
    found = _sorted_ratios(result)
    if found is None:
        raise GraftError(
            f"{name} has under {_RATIOS_MIN} points that two contenders have a time of"
        )
    return found.svg


def figures(result: results.Result) -> list[Figure]:
    """Every figure that the rows have something for."""
    out: list[Figure | None] = [_roofline(result), _sorted_ratios(result)]
    for case, dtype in dict.fromkeys((row["case"], row["dtype"]) for row in result["rows"]):
        rows = [r for r in result["rows"] if r["case"] == case and r["dtype"] == dtype]
        out.append(_heat_map(result, case, dtype, rows))
        out.append(_columns(result, case, dtype, rows))
    return [figure for figure in out if figure is not None]


def present(result: results.Result) -> list[str]:
    """The contenders that ran."""
    return [label for label, about in result["contenders"].items() if "absent" not in about]


def provenance(result: results.Result) -> list[str]:
    """What was measured, where, with what: one line each."""
    lines = []
    for gpu in result["gpus"]:
        if "error" in gpu:
            lines.append(f"GPU {gpu['index']}: {gpu['error']}")
            continue
        words = [f"GPU {gpu['index']}: {gpu.get('name', 'not named')}"]
        if "sms" in gpu:
            words.append(f"{gpu['sms']} SMs")
        if "driver" in gpu:
            words.append(f"driver {gpu['driver']}")
        if "copy_gb_per_s" in gpu:
            words.append(f"copy {gpu['copy_gb_per_s']['median']:.0f} GB/s")
        lines.append(", ".join(words))
    for label, about in result["contenders"].items():
        if "absent" in about:
            lines.append(f"{label}: absent, {about['absent']}")
            continue
        knobs = ", ".join(f"{knob}={value!r}" for knob, value in about["knobs"].items())
        runs = about["impl"] + (f" {about['version']}" if about.get("version") else "")
        lines.append(
            f"{label}: {runs}"
            + "".join(f", {name} {about[name]}" for name in ("torch", "triton") if name in about)
            + (f", {knobs}" if knobs else "")
        )
    lines.append(f"pin {result['pin']}, stack {result['stack_hash'][:12]}, {result['date']}")
    lines += list(result["commands"])
    if not result["complete"]:
        lines.append(f"not complete: {len(result['rows'])} points, then the run was cut off")
    return lines


def errors(result: results.Result) -> list[str]:
    """One line an error."""
    return [
        f"{results.key(row)}, {label}: {time['error']['kind']}: {time['error']['message']}"
        for row in result["rows"]
        for label, time in row["times"].items()
        if "error" in time
    ]


def _timed(rows: Iterable[results.Row], label: str) -> Iterable[tuple[results.Row, float]]:
    for row in rows:
        if "us" in row["times"].get(label, {}):
            yield row, row["times"][label]["us"]["median"]


def _roofline(result: results.Result) -> Figure | None:
    """Achieved bandwidth over bytes moved, under the measured copy bandwidth."""
    rows = [row for row in result["rows"] if row.get("bytes")]
    bands = [g["copy_gb_per_s"]["median"] for g in result["gpus"] if "copy_gb_per_s" in g]
    if not rows or not bands:
        return None

    def draw(axes: Any) -> None:
        axes.axhline(max(bands), color="0.4", linewidth=1)
        axes.annotate(
            "copy bandwidth, measured",
            (0.01, max(bands)),
            xycoords=("axes fraction", "data"),
            va="bottom",
            fontsize=8,
            color="0.3",
        )
        for label, colour in zip(present(result), _colours(), strict=False):
            points = [
                (row["bytes"] / 1e6, row["bytes"] / us / 1e3) for row, us in _timed(rows, label)
            ]
            if points:
                axes.plot(*zip(*points, strict=True), ".", color=colour, label=label, alpha=0.7)
        axes.set(xscale="log", xlabel="bytes that must move, MB", ylabel="achieved, GB/s")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)

    return _figure("Roofline", "Bytes that must move over time, per point.", draw)


def _sorted_ratios(result: results.Result) -> Figure | None:
    labels = present(result)
    base = labels[0] if labels else ""
    curves = {}
    for label in labels[1:]:
        found = [cells.speedup(row, base, label) for row in result["rows"]]
        ratios = sorted(ratio for ratio in found if ratio is not None)
        if len(ratios) >= _RATIOS_MIN:
            curves[label] = ratios
    if not curves:
        return None

    def draw(axes: Any) -> None:
        axes.axhline(1, color="0.4", linewidth=1)
        for (label, ratios), colour in zip(curves.items(), _colours(1), strict=False):
            share = [100 * (i + 0.5) / len(ratios) for i in range(len(ratios))]
            axes.plot(share, ratios, ".-", color=colour, label=f"{label} (n = {len(ratios)})")
        axes.set(xlabel="share of points, %", ylabel=f"time of {base} / time", yscale="log")
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, 0.95), max(high, 1.05))  # or noise looks like a slope
        _plain_ticks(axes)
        axes.legend(frameon=False)

    return _figure("Sorted ratios", f"Above 1, faster than {base}.", draw)


def _heat_map(
    result: results.Result, case: str, dtype: str, rows: Sequence[results.Row]
) -> Figure | None:
    """Ratio of the first contender to the second over M and N."""
    labels = present(result)
    if len(labels) < 2:
        return None
    points = [
        (*row["shape"], ratio)
        for row in rows
        if len(row["shape"]) == 2
        and (ratio := cells.speedup(row, labels[0], labels[1])) is not None
    ]
    if len({(m, n) for m, n, _ in points}) < _HEAT_MIN:
        return None

    def draw(axes: Any) -> None:
        m, n, ratio = zip(*points, strict=True)
        span = max(0.1, *(abs(math.log2(value)) for value in ratio))
        dots = axes.scatter(
            n,
            m,
            c=[math.log2(value) for value in ratio],
            cmap="RdBu",
            vmin=-span,
            vmax=span,
            marker="s",
            s=70,
            edgecolors="0.7",
            linewidths=0.3,
        )
        axes.set(xscale="log", yscale="log", xlabel="N (columns)", ylabel="M (rows)")
        bar = axes.figure.colorbar(dots, ax=axes)
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{2**value:.2f}")
        bar.set_label(f"time of {labels[0]} / time of {labels[1]}")

    return _figure(f"{case}, {dtype}, over M and N", "Blue is faster, red slower.", draw)


def _columns(
    result: results.Result, case: str, dtype: str, rows: Sequence[results.Row]
) -> Figure | None:
    """Time against rows at up to three fixed widths, of those that have many row counts."""
    widths: dict[int, list[results.Row]] = {}
    for row in rows:
        if len(row["shape"]) == 2:
            widths.setdefault(row["shape"][1], []).append(row)
    most = max(map(len, widths.values()), default=0)
    dense = sorted(n for n, found in widths.items() if len(found) >= max(_COLUMN_MIN, most / 2))
    chosen = sorted({dense[0], dense[len(dense) // 2], dense[-1]}) if dense else []
    if not chosen:
        return None

    def draw(axes: Any) -> None:
        for label, colour in zip(present(result), _colours(), strict=False):
            for n, style in zip(chosen, ("-", "--", ":"), strict=False):
                points = sorted((row["shape"][0], us) for row, us in _timed(widths[n], label))
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        style,
                        marker=".",
                        color=colour,
                        label=f"{label}, N = {n}",
                    )
        axes.set(xscale="log", yscale="log", xlabel="M (rows)", ylabel="time, us")
        axes.legend(frameon=False, fontsize=8)

    caption = f"Fixed N = {', '.join(map(str, chosen))}."
    return _figure(f"{case}, {dtype}, time against rows", caption, draw)


def _colours(start: int = 0) -> list[str]:
    return [_COLOURS[(start + i) % len(_COLOURS)] for i in range(len(_COLOURS))]


def _plain_ticks(axes: Any) -> None:
    """Ratios as 0.9, 1, 1.5 rather than powers of ten."""
    ticker = import_module("matplotlib.ticker")
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(ticker.FormatStrFormatter("%g"))
    axes.tick_params(axis="y", which="minor", labelsize=7)


def _figure(title: str, caption: str, draw: Callable[[Any], None]) -> Figure:
    """Draw on axes of a new figure. The same rows give the same SVG, byte for byte."""
    matplotlib = _need("matplotlib")
    _need("matplotlib.figure")
    style = {
        "svg.hashsalt": "graft",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "0.92",
    }
    with matplotlib.rc_context(style):
        figure = matplotlib.figure.Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, loc="left")
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    # Inside HTML, the XML prologue has no place.
    return Figure(title, caption, text[text.index("<svg") :])


def _apart(found: Sequence[Figure], prefix: str) -> list[Figure]:
    """Figures whose ids begin with `prefix` and their number: two on one page must not meet."""
    out = []
    for i, figure in enumerate(found):
        own = f"{prefix}-{i}-"
        text = re.sub(r'\bid="', f'id="{own}', figure.svg)
        text = re.sub(r'href="#', f'href="#{own}', text)
        text = re.sub(r"url\(#", f"url(#{own}", text)
        out.append(replace(figure, svg=text))
    return out


def _cells(table: str) -> list[list[str]]:
    """A Markdown table's cells, head first, without the rule."""
    lines = [line.strip("|").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for i, line in enumerate(lines) if i != 1]


def _need(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise GraftError(
            f"a report needs {module.split('.')[0]}, which is not installed",
            next='pip install "matplotlib>=3.8,<4" "jinja2>=3.1,<4"',
        ) from None
