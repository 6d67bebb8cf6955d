"""Test ``commprof paper``, which works from CSV files alone.

The texts of the figures and the numbers of the tables are read back.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pypdf
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from commprof.cli import main
from commprof.export import paper_figures
from commprof.export.csv import export_csv
from commprof.export.paper_export import read_export, write_paper
from commprof.export.paper_figures import Style, coinciding, wrapped
from commprof.export.paper_tables import comparison, escaped, job_of
from support.runs import SyntheticRun


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """Return the directory of the export of three runs. The runs themselves are deleted."""
    base = tmp_path_factory.mktemp("paper")
    runs = []
    for name, op, intended in (
        ("a", "all_reduce", None),
        ("b", "reduce", None),
        ("c", "all_to_all", "reduce_scatter"),
    ):
        config = {"zero_optimization": {"gradient_reduction": name, "note": "50 % & more_of_it {x}"}}
        run = SyntheticRun(world_size=4, config=config)
        for step in range(9):
            run.add_step(step, duration_ns=5_000_000 + step * 1000, loss=3.0 - step / 10)
            run.add_collective(
                op, payload_bytes=4 << 20, step=step, purpose="gradient_reduce", intended_op=intended
            )
            run.add_collective("all_gather", payload_bytes=4 << 20, step=step, purpose="parameter_gather")
        runs.append(run.write(base / name))
    export_csv(runs, base / "csv")
    for run in runs:
        shutil.rmtree(run)
    return base / "csv"


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "paper"
    write_paper(exported, out)
    return out


@pytest.mark.long
def test_every_figure_in_two_widths_and_two_formats(made):
    figures = {
        f"{name}_{width}.{kind}"
        for name in ("traffic", "step_time", "loss")
        for width in ("one", "two")
        for kind in ("pdf", "svg")
    }
    assert {path.name for path in made.iterdir()} == figures | {
        "comparison.tex",
        "traffic.tex",
        "sources.json",
    }


@pytest.mark.long
@pytest.mark.parametrize(("width", "inches"), [("one", 3.33), ("two", 7.0)])
def test_figures_are_vectors_with_text_and_embedded_fonts(made, width, inches):
    for name, words in (
        ("traffic", ("wire bytes per step and rank", "all_reduce")),
        ("step_time", ("time per step (ms)",)),
        ("loss", ("training step",)),
    ):
        (page,) = pypdf.PdfReader(made / f"{name}_{width}.pdf").pages
        assert float(page.mediabox.width) == pytest.approx(inches * 72, abs=1)
        text = page.extract_text()
        assert all(word in text for word in words), text
        fonts = page["/Resources"]["/Font"]
        for font in fonts.values():
            font = font.get_object()
            inner = font["/DescendantFonts"][0].get_object() if "/DescendantFonts" in font else font
            assert "/FontFile2" in inner["/FontDescriptor"].get_object(), "a TrueType font that is embedded"
        assert "/XObject" not in page["/Resources"] or not any(
            each.get_object()["/Subtype"] == "/Image" for each in page["/Resources"]["/XObject"].values()
        )
        svg = (made / f"{name}_{width}.svg").read_text()
        assert (
            "<text" in svg
            and "<image" not in svg
            and "http"
            not in re.sub(
                r'xmlns[^"]*"[^"]*"|http://www\.w3\.org[^"\s>]*|https?://(purl|creativecommons|matplotlib)[^"\s<]*',
                "",
                svg,
            )
        )


def rows_of(text: str) -> list[list[str]]:
    """Return the rows of all blocks of a table, without the headings."""
    blocks = re.findall(r"\\midrule\n(.*?)    \\bottomrule", text, re.DOTALL)
    return [line.strip().removesuffix(r" \\").split(" & ") for block in blocks for line in block.splitlines()]


def test_the_tables_hold_the_numbers_of_the_comparison(made):
    text = (made / "comparison.tex").read_text()
    rows = rows_of(text)
    assert len({text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")}) == 1
    assert [row[0] for row in rows] == ["A", "B", "C"] * text.count(r"\midrule")
    joined = {name: " | ".join(" | ".join(row[1:]) for row in rows if row[0] == name) for name in "ABC"}
    # On 4 ranks, 4 MiB are reduced and 4 MiB gathered, so the payload is 8. The all_reduce sends 6 MiB on the
    # wire, and the gather 3. The reduce is modelled with 3 as issued, and gloo executes it with 15/16 of the
    # payload.
    assert "8 MiB | 9 MiB | 9 MiB" in joined["A"] and "| 5.00 (5.00--5.01) |" in joined["A"]
    assert "8 MiB | 6 MiB | 6.75 MiB" in joined["B"] and joined["B"].endswith("2.2000")
    assert r"\texttt{all\_to\_all} \\ for \texttt{reduce\_scatter}" in joined["C"]
    for line in rows:
        assert not re.search(r"(?<!\\)[%$#_]", " ".join(line))


@pytest.mark.parametrize(
    ("exact", "low", "high", "shown"),
    [
        ("29500000", "29500000", "29500000", "29.5"),
        ("", "29498656", "29530237", "29.5"),
        ("", "3100000", "4000000", "3.10--4"),
        ("", "3100000", "", r"$\geq$ 3.10"),
    ],
)
def test_exposed_time_that_has_bounds_is_in_the_table(exported, exact, low, high, shown):
    export = read_export(exported)
    told = {"exposed_ns": exact, "exposed_low_ns": low, "exposed_high_ns": high}
    rows = [{**row, **told} for row in export.comparison]
    text = comparison(rows, job_of(export.runs, export.parameters, export.provenance))
    assert text.count(f"& {shown} ") == len(rows)
    assert ("Two values of it are bounds" in text) == ("3.10" in shown)


def test_moved_bytes_are_those_of_a_rank_like_the_columns_beside_them(exported):
    export = read_export(exported)
    rows = [{**row, "world_size": "4", "moved_bytes_per_step": str(4 * 5120)} for row in export.comparison]
    text = comparison(rows, job_of(export.runs, export.parameters, export.provenance))
    assert "& 5 KiB " in text and "20 KiB" not in text
    assert "divided by the ranks" in text
    rows = [{**row, "world_size": ""} for row in rows]
    assert "Moved" not in comparison(rows, job_of(export.runs, export.parameters, export.provenance))


def test_captions_name_interval_ranks_model_and_repeats(made):
    plain = (made / "comparison.tex").read_text().replace(r"\allowbreak{}", "")
    for words in (
        "95 \\% interval by order statistics",
        "4 ranks, gloo",
        "model: train.py",
        "1 run of each setting",
    ):
        assert words in plain, plain
    assert r"A: gradient\_reduction=a" in plain and r"C: gradient\_reduction=c" in plain


def test_no_bytes_are_shown_as_zero(tmp_path):
    run = SyntheticRun(world_size=2)
    for step in range(3):
        run.add_step(step)
        run.add_collective("all_reduce", payload_bytes=4, step=step, purpose="gradient_norm")
        run.add_collective("all_reduce", payload_bytes=4 << 30, step=step, purpose="gradient_reduce")
    export_csv(run.write(tmp_path / "run"), tmp_path / "csv")
    write_paper(tmp_path / "csv", tmp_path / "out")
    rows = rows_of((tmp_path / "out" / "traffic.tex").read_text())
    assert [(row[1], row[-1]) for row in rows] == [("gradient norm", "4 B"), ("gradient reduce", "4 GiB")]


@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="no pdflatex (Debian: texlive-latex-recommended)"
)
@pytest.mark.parametrize("columns", ["twocolumn", "onecolumn"])
def test_the_tables_compile_and_fit_a_column(made, tmp_path, columns):
    body = "\n".join(rf"\input{{{made / name}}}" for name in ("comparison.tex", "traffic.tex"))
    (tmp_path / "paper.tex").write_text(
        rf"\documentclass[{columns}]{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    )
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout, done.stdout


def boxes_of(figure) -> list:
    """Return the text and the box in pixels of all drawn text of ``figure``."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    outside = {  # matplotlib keeps ticks outside of the view, but does not draw them.
        tick.label1
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [each for each in figure.findobj(Text) if each.get_visible() and each not in outside]
    shown = [each for each in texts if each.get_text().strip()]
    return [(each.get_text(), each.get_window_extent(renderer)) for each in shown]


@pytest.mark.parametrize("width", ["one", "two"])
@pytest.mark.parametrize("font", ["sans", "serif"])
def test_no_text_is_cut_or_overlaps(exported, width, font):
    export = read_export(exported)
    style = Style(width, font)
    for figure in (
        paper_figures.traffic(export.comparison, export.traffic, *export.level, style),
        paper_figures.step_time(export.comparison, style),
        paper_figures.loss(export.comparison, export.steps, style),
    ):
        boxes = boxes_of(figure)
        for text, box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0, text
            assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
        for place, (text, box) in enumerate(boxes):
            assert not [other for other, second in boxes[place + 1 :] if box.overlaps(second)], text


def test_figures_have_executed_bytes_a_zero_tick_and_room_at_the_frame(exported):
    export = read_export(exported)
    figure = paper_figures.traffic(export.comparison, export.traffic, *export.level, Style("one"))
    (axes,) = figure.axes
    assert "as executed" in axes.get_xlabel()
    assert "0" in [label.get_text() for label in axes.get_xticklabels()]
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(9) and axes.get_xlim()[1] > 9.2
    stacks = [legend.get_text() for legend in figure.legends[0].get_texts()]
    assert stacks == ["all_reduce", "reduce", "all_to_all for reduce_scatter", "all_gather"]
    order = [container.get_label() for container in axes.containers]
    assert order == stacks, "legend and stack have one order"


def test_lines_that_coincide_have_one_label(exported):
    export = read_export(exported)
    (axes,) = paper_figures.loss(export.comparison, export.steps, Style("one")).axes
    assert [text.get_text() for text in axes.texts] == ["A, B, C"] and len(axes.lines) == 1
    assert not axes.figure.legends or "A:" in axes.figure.legends[0].get_texts()[0].get_text()
    curves = {"a": {0: 3.0, 1: 1.0}, "b": {0: 3.0, 1: 1.001}, "c": {0: 3.0, 1: 1.1}, "d": {0: 3.0}}
    assert coinciding(curves) == [["a", "b"], ["c"], ["d"]]


@pytest.mark.long
def test_another_font_is_used_and_an_unknown_one_refused(exported, tmp_path, capsys):
    assert command("paper", exported, "--out", tmp_path / "out", "--font", "serif") == 0
    (page,) = pypdf.PdfReader(tmp_path / "out" / "traffic_one.pdf").pages
    fonts = {font.get_object()["/BaseFont"] for font in page["/Resources"]["/Font"].values()}
    assert fonts and all("STIX" in name for name in fonts)
    assert command("paper", exported, "--out", tmp_path / "none", "--font", "Nosuch") == 2
    assert "no font 'Nosuch'" in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("text", "set_"),
    [
        ("a_b%c&d$e#f", r"a\_\allowbreak{}b\%c\&d\$e\#f"),
        ("{~^\\}", r"\{\textasciitilde{}\textasciicircum{}\textbackslash{}\}"),
        ("a\x00\nb", "ab"),
    ],
)
def test_text_for_latex(text, set_):
    assert escaped(text) == set_


def test_a_label_is_broken_after_commas_and_never_cut():
    label = "reduce_scatter=true, use_multi_rank_bucket_allreduce=false, stage=2"
    assert wrapped(label, 22).split(",\n") == label.split(", ")
    assert wrapped("a=1, b=2", 22) == "a=1, b=2"
    few = [{"label": "stage=1"}, {"label": "stage=2"}]
    assert paper_figures.named(few, 22) == ({"stage=1": "stage=1", "stage=2": "stage=2"}, [])
    names, key = paper_figures.named([{"label": label}, {"label": "stage=1"}], 22)
    assert names == {label: "A", "stage=1": "B"} and key == [f"A: {label}", "B: stage=1"]


@pytest.mark.long
def test_the_same_csv_gives_the_same_files(exported, made, tmp_path):
    write_paper(exported, tmp_path / "again")
    for path in made.iterdir():
        if path.suffix != ".json":
            assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.long
def test_what_the_csv_does_not_have_is_not_drawn(tmp_path):
    run = SyntheticRun(world_size=2)
    run.add_step(0)
    run.add_collective("all_reduce", payload_bytes=64, purpose="gradient_reduce")
    export_csv(run.write(tmp_path / "run"), tmp_path / "csv")
    files = write_paper(tmp_path / "csv", tmp_path / "out")
    assert {file.path.stem for file in files if file.path.suffix == ".pdf"} == {"traffic_one", "traffic_two"}
    assert '"loss"' in (tmp_path / "out" / "sources.json").read_text()


def test_bad_input_is_one_line(exported, tmp_path, capsys):
    assert command("paper", tmp_path / "nothere", "--out", tmp_path / "out") == 2
    assert command("paper", tmp_path, "--out", tmp_path / "out") == 1
    broken = tmp_path / "broken"
    shutil.copytree(exported, broken)
    (broken / "comparison.csv").write_text("label,wrong\r\n1,2\r\n")
    assert command("paper", broken, "--out", tmp_path / "out") == 1
    assert "has no column" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_figures_are_replaced_only_by_force(exported, tmp_path):
    assert command("paper", exported, "--out", tmp_path / "out") == 0
    assert command("paper", exported, "--out", tmp_path / "out") == 2
    assert command("paper", exported, "--out", tmp_path / "out", "--force") == 0
