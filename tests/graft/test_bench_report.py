"""Reports: Markdown, SVG, and the HTML page in a headless browser."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from graft.bench import report, results, shapes
from graft.cli.bench_command import bench
from graft.stack import pins

from .test_bench_results import result, row, saved

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def chromium():
    """A Chromium on PATH, or one that `playwright install chromium` put into its cache."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache/ms-playwright")
    installed = [*cache.glob("chromium*/*/chrome"), *cache.glob("chromium*/*/*headless*shell")]
    return next(filter(None, [*map(shutil.which, names), *map(str, sorted(installed))]), None)


CHROMIUM = chromium()
RESULTS = pins.ROOT / "bench" / "results"
COMMITTED = sorted([*RESULTS.glob("*.json"), *RESULTS.glob("*.json.gz")])
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def full(tmp_path):
    """A grid with a failure, so that there is something for every figure."""
    rows = [
        row("rms_norm_backward", (m, n), 5.0 + m * n / 1e5, 4.0 + m * n / 2e5, group="grid")
        for m, n in shapes.GRID[::5]
    ]
    rows.append(row("rms_norm_backward", (7, 7), 5.0, "wrong"))
    return saved(tmp_path / "full.json", *rows)


def test_markdown_says_where_it_comes_from_and_what_failed(full):
    text = report.markdown([("full", results.load(full))])
    assert "NVIDIA H200, driver 580.1, copy 4250 GB/s" in text
    assert "stack abababababab" in text
    assert "| rms_norm_backward | bf16 |" in text
    assert "rms_norm_backward 7x7 bf16, patched: wrong: no" in text


def test_figures_without_data_are_left_out():
    some = [row("a", (m, 2 * m), 2.0, 1.0) for m in (4, 8, 16)]
    assert [figure.title for figure in report.figures(result(some[0]))] == ["Roofline"]
    titles = [figure.title for figure in report.figures(result(*some))]
    assert titles == ["Roofline", "Sorted ratios"]
    alone = result(row("a", (4, 8), "oom", "oom"), gpus=[])
    assert report.figures(alone) == []


def test_the_same_rows_give_the_same_bytes(full):
    data = [("full", results.load(full))]
    assert report.html(data) == report.html(data)


def drawn(svg):
    """Marks of a figure: the points of its curves, or the symbols that it repeats."""
    tree = ElementTree.fromstring(svg)
    paths = [path.get("d", "") for path in tree.iter(f"{SVG}path")]
    return max(path.count("L") + 1 for path in paths), len([*tree.iter(f"{SVG}use")])


def test_every_figure_holds_its_points(full):
    """Without a browser: the SVG is well formed, and has a mark for each point."""
    data = results.load(full)
    timed = [row for row in data["rows"] if "us" in row["times"]["patched"]]
    found = {figure.title: drawn(figure.svg) for figure in report.figures(data)}
    assert [*found] == [
        "Roofline",
        "Sorted ratios",
        "rms_norm_backward, bf16, over M and N",
        "rms_norm_backward, bf16, time against rows",
    ]
    curve, marks = found["Sorted ratios"]
    assert curve == len(timed)
    assert marks >= len(timed)
    assert found["Roofline"][1] >= 2 * len(timed)
    assert found["rms_norm_backward, bf16, over M and N"][1] >= len(timed)
    assert found["rms_norm_backward, bf16, time against rows"][0] >= 3


def test_the_page_has_every_figure_and_row(full):
    data = results.load(full)
    page = report.html([("one", data), ("two", data)])
    figures = re.findall(r"<figure>(.*?)</figure>", page, re.S)
    assert len(figures) == 2 * len(report.figures(data))
    for figure in figures:
        ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])
    for each in data["rows"]:
        assert page.count(f"<td>{shapes.text(tuple(each['shape']))}</td>") >= 2


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_committed_files_have_a_report(file):
    data = [(file.stem, results.load(file))]
    page = report.html(data)
    assert page.count("<figure>") >= (len(data[0][1]["rows"]) > 3)
    assert "None" not in re.sub(r"<svg.*?</svg>", "", page, flags=re.S)
    text = report.markdown(data)
    for each in data[0][1]["rows"]:
        assert shapes.text(tuple(each["shape"])) in text


def test_the_page_stands_alone(full):
    data = results.load(full)
    page = report.html([("full", data), ("again", data)])
    links = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert all(link.startswith("data:") for link in links)
    assert "<script" not in page
    assert "@import" not in page
    assert not re.findall(r"url\((?!#)", page)
    # Names of vocabularies are no references: nothing is loaded from them.
    plain = re.sub(r'xmlns(:\w+)?="[^"]*"|rdf:resource="[^"]*"', "", page)
    assert re.findall(r"https?://[^\s\"<]+", plain) == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', page)
    assert set(used) <= set(ids)


def test_text_of_a_result_is_escaped():
    odd = result(row("a", (4, 8), 2.0, 1.0), commands=["graft bench <script>x</script>"])
    assert "<script>" not in report.html([("<b>", odd)])


def test_a_page_of_nothing_is_a_page():
    assert "graft bench" in report.html([("none", result())])
    assert "graft bench" in report.markdown([("none", result())])


def test_the_report_command_writes_what_is_asked(full, tmp_path):
    run = CliRunner().invoke
    done = run(
        bench,
        ["report", str(full), "--html", str(tmp_path / "o.html"), "--svg", str(tmp_path / "o.svg")],
        catch_exceptions=False,
    )
    assert done.exit_code == 0
    assert (tmp_path / "o.svg").read_text().startswith("<svg")
    plain = run(bench, ["report", str(full)], catch_exceptions=False)
    assert plain.output.startswith("## full")


# Run in the page: each figure's size on screen, and how much of it is drawn.
PROBE = """
<script>
const found = [...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll("path, use")].filter(mark => {
    const size = mark.getBoundingClientRect();
    return size.width + size.height > 0 && size.right <= box.right + 2 && size.left >= box.left - 2;
  });
  return {title: figure.innerText.split("\\n").pop(), width: box.width, height: box.height,
          marks: marks.length};
});
const rows = document.querySelectorAll("tbody tr").length;
document.body.innerHTML = "<pre id=found></pre>";
document.getElementById("found").textContent = JSON.stringify({found, rows});
</script>
"""


def browse(page, *flags):
    return subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--log-level=0",
            "--window-size=1400,1200",
            *flags,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_a_browser_draws_every_plot_without_a_console_message(full, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report.html([("full", results.load(full))]))
    plain = browse(page, "--dump-dom")
    assert "CONSOLE" not in plain.stderr
    page.write_text(page.read_text() + PROBE)
    probed = browse(page, "--dump-dom")
    assert "CONSOLE" not in probed.stderr
    text = re.search(r'<pre id="found">(.*?)</pre>', probed.stdout, re.S)[1]
    seen = json.loads(text.replace("&quot;", '"').replace("&amp;", "&"))
    assert len(seen["found"]) == 4
    for figure in seen["found"]:
        assert figure["width"] > 300, figure
        assert figure["height"] > 200, figure
        assert figure["marks"] > 20, figure
    assert seen["rows"] == 1 + len(results.load(full)["rows"])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_a_browser_shows_the_committed_files(tmp_path):
    data = [(file.stem, results.load(file)) for file in COMMITTED]
    text = report.html(data)
    page = tmp_path / "report.html"
    page.write_text(text + PROBE)
    probed = browse(page, "--dump-dom")
    assert "CONSOLE" not in probed.stderr
    found = re.search(r'<pre id="found">(.*?)</pre>', probed.stdout, re.S)[1]
    seen = json.loads(found.replace("&quot;", '"').replace("&amp;", "&"))
    assert len(seen["found"]) == text.count("<figure>") > 3
    assert all(figure["marks"] > 20 and figure["height"] > 200 for figure in seen["found"])
