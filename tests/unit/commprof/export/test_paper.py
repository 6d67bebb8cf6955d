"""commprof paper: from CSV files alone; the text of the figures and the numbers of the tables are read back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pypdf
import pytest

from commprof.cli import main
from commprof.export.csv import export_csv
from commprof.export.paper import write_paper
from commprof.export.paper_figures import shortened
from commprof.export.paper_tables import escaped
from support.runs import SyntheticRun


def command(*words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """The export of three runs; the runs themselves are gone."""
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


def test_the_tables_hold_the_numbers_of_the_comparison(made):
    text = (made / "comparison.tex").read_text()
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line][1:]
    assert len(rows) == 3 and all(line.count(" & ") == 7 for line in rows)
    # 4 MiB reduced and 4 MiB gathered on 4 ranks: payload 8; all_reduce sends 6 of wire, and 3 for the gather;
    # gloo runs a reduce with 15/16 of the payload.
    assert " & 8.00 & 9.00 & 5.0 (" in rows[0]
    assert " & 8.00 & 6.75 & 5.0 (" in rows[1] and " & 2.2000 " in rows[1]
    assert r"\texttt{all\_to\_all} for \texttt{reduce\_scatter}" in rows[2]
    for line in rows:
        assert not re.search(r"(?<!\\)[%$#_]", line)


@pytest.mark.parametrize(
    ("text", "set_"),
    [
        ("a_b%c&d$e#f", r"a\_b\%c\&d\$e\#f"),
        ("{~^\\}", r"\{\textasciitilde{}\textasciicircum{}\textbackslash{}\}"),
        ("a\x00\nb", "ab"),
    ],
)
def test_text_for_latex(text, set_):
    assert escaped(text) == set_


def test_long_settings_are_broken_and_cut():
    lines = shortened("reduce_scatter=true, use_multi_rank_bucket_allreduce=false, stage=2", "one").split(
        "\n"
    )
    assert len(lines) > 1 and all(len(line) <= 22 for line in lines)
    assert shortened("a=1, b=2", "two") == "a=1, b=2"


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
