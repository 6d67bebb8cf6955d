"""Test the pages Traffic matrix, Buckets, Stragglers and Alignment without a browser.

The figures show the answers of the API.
"""

import json
import math

import pandas as pd
import plotly.graph_objects as go
import pytest
from dash import dcc, html
from plotly.utils import PlotlyJSONEncoder

from commprof.analysis import api
from commprof.cli import execute
from commprof_dash.address import link, parse
from commprof_dash.app import draw_page, find_page
from commprof_dash.charts import (
    alignment_chart,
    expert_charts,
    lateness_chart,
    matrix_chart,
    rank_charts,
    topology_chart,
)
from commprof_dash.components.tables import filled
from commprof_dash.data import Runs
from commprof_dash.pages.matrix.page import parse_steps
from commprof_dash.pages.timeline.data import record_text, view_in
from support.detailed_runs import aligned_run, detailed_run
from support.expert_runs import uneven_experts
from support.kinds_of_runs import import_kineto
from support.runs import SyntheticRun, with_sums

pytestmark = pytest.mark.shared_answers

HOSTILE = "<script>alert(1)</script>" + "x" * 10_000
PATHS = ("/matrix", "/buckets", "/stragglers", "/alignment")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    detailed_run().write(base / "plain")
    on_gloo = detailed_run()
    for row in on_gloo.rows["collectives"]:
        row["backend"] = "gloo"
    on_gloo.write(base / "on-gloo")
    aligned_run(base / "aligned")
    return base


def draw(directory, path):
    pathname, _, search = path.partition("?")
    heading, drawing = draw_page(find_page(pathname), Runs(directory), pathname, f"?{search}", "light")
    return [*heading, *drawing.controls, *drawing.body]


def text_of(parts):
    return json.dumps(list(parts), cls=PlotlyJSONEncoder)


def figures_of(parts):
    found = (part for root in parts for part in root._traverse() if isinstance(part, dcc.Graph))
    return {part.id["name"]: part.figure for part in found}


@pytest.mark.long
def test_figures_that_are_made_in_one_go_pass_the_checks_of_plotly(directory):
    checked = 0
    for run in ("plain", "aligned"):
        for path in ("/matrix", "/stragglers", "/bandwidth", "/timeline"):
            for figure in figures_of(draw(directory, link(path, run=run))).values():
                whole = json.loads(figure.to_json())
                assert json.loads(go.Figure(whole).to_json()) == whole
                checked += 1
    assert checked >= 8


def test_a_filled_cell_is_written_as_one_that_was_constructed(directory):
    blank = html.Td(className="number", **{"data-label": "Rank"})
    whole = html.Td("7", className="number", **{"data-label": "Rank"})
    assert filled(blank, children="7").to_plotly_json() == whole.to_plotly_json()
    assert blank.children is None


def drawn_cells(figure):
    heat = figure.data[0]
    rows = figure.layout.yaxis.ticktext
    return {
        (int(rows[i]), int(rows[j])): 2**value
        for i, row in enumerate(heat.z)
        for j, value in enumerate(row)
        if value is not None
    }


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "query", ["", "&op=reduce", "&purpose=pipeline", "&steps=2-3", "&op=all_gather&steps=5"]
)
def test_the_matrix_draws_what_the_api_answers(directory, query, backend):
    """The matrix shows what the backend executes, if this is known, and the traffic as issued."""
    name = {"nccl": "plain", "gloo": "on-gloo"}[backend]
    asked = dict(part.split("=") for part in query.split("&") if part)
    steps = asked.get("steps")
    window = None if steps is None else (int(steps.split("-")[0]), int(steps.split("-")[-1]))
    frame = api.matrix(directory / name, steps=window, op=asked.get("op"), purpose=asked.get("purpose"))
    known = backend == "gloo" or asked.get("purpose") == "pipeline"  # Messages are executed as recorded.
    for measure, column in (
        ("wire", "executed_wire_bytes" if known else "wire_bytes"),
        ("issued", "wire_bytes"),
    ):
        parts = draw(directory, f"/matrix?run={name}{query}&measure={measure}&per=total")
        assert ("it is not known which ranks send the bytes of" in text_of(parts)) == (
            not known and measure == "wire"
        )
        expected = {
            (row["sender"], row["receiver"]): row[column] for row in frame.to_dict("records") if row[column]
        }
        assert drawn_cells(figures_of(parts)["matrix"]) == pytest.approx(expected)


def test_messages_are_drawn_as_they_were_sent_and_without_any_it_says_so(directory):
    assert drawn_cells(
        figures_of(draw(directory, "/matrix?run=plain&measure=messages&per=total"))["matrix"]
    ) == {(0, 3): pytest.approx(12 * 4096)}
    assert "The selection has no send" in text_of(draw(directory, "/matrix?run=aligned&measure=messages"))
    assert "commprof run --wire" in text_of(draw(directory, "/matrix?run=plain&measure=counters"))


def test_the_page_names_the_model_and_the_imbalance_of_the_owners(directory):
    text = text_of(draw(directory, "/matrix?run=plain"))
    assert "all_gather: around a ring in the order of the group" in text
    assert "reduce: from each other rank to the root" in text
    frame = api.owners(directory / "plain")
    assert frame.attrs["imbalance"] == 3.0  # Two of four ranks are owners, of one quarter and three quarters.
    assert "The largest is 3 times the mean" in text


@pytest.mark.parametrize(
    ("written", "steps"),
    [("3", (3, 3)), ("2-9", (2, 9)), ("-1", (-1, -1)), ("-1-4", (-1, 4)), ("2 to 3", (2, 3)), ("", None), ("all", None)],
)  # fmt: skip
def test_steps_as_people_write_them(written, steps):
    assert parse_steps(written) == (steps, None)


@pytest.mark.sampled
@pytest.mark.parametrize("written", ["x", "1-2-3", "1e9", "99999999999999", "<b>"])
def test_steps_that_cannot_be_understood_show_all_and_say_so(directory, written):
    assert parse_steps(written)[1] is not None
    assert "Write one step" in text_of(draw(directory, link("/matrix", run="plain", steps=written)))


def test_steps_that_the_run_lacks_or_that_go_backwards_are_refused_in_place(directory):
    for written, told in (("9-2", "as 2-9"), ("500-600", "has the steps 0 to")):
        text = text_of(draw(directory, link("/matrix", run="plain", steps=written)))
        assert told in text and "All steps are shown" in text


def test_bytes_without_a_known_root_are_those_of_a_step_where_the_matrix_is_of_a_step(tmp_path):
    run = SyntheticRun(world_size=2)
    for step in range(4):
        run.add_step(step)
        # The root is no rank of the group.
        run.add_collective("broadcast", payload_bytes=1 << 20, step=step, peer=9)
    run.write(tmp_path / "run")
    for measure in ("wire", "issued"):
        assert "1.00 MiB per step are in no cell" in text_of(
            draw(tmp_path, f"/matrix?run=run&measure={measure}")
        )
        total = text_of(draw(tmp_path, f"/matrix?run=run&measure={measure}&per=total"))
        assert "4.00 MiB are in no cell" in total


def test_the_matrix_shows_a_step_and_the_step_of_another_page(directory):
    steps = sorted(set(api.step_times(directory / "plain")["step"]))
    warm = api.matrix(directory / "plain", steps=(steps[1], steps[-1]))
    wanted = {
        (row.sender, row.receiver): row.wire_bytes / (len(steps) - 1)
        for row in warm.itertuples()
        if row.wire_bytes
    }
    parts = draw(directory, "/matrix?run=plain&measure=issued")
    assert drawn_cells(figures_of(parts)["matrix"]) == pytest.approx(wanted)
    assert f"per step, mean of the {len(steps) - 1} steps" in text_of(parts)
    one = draw(directory, f"/matrix?run=plain&measure=issued&step={steps[2]}")
    frame = api.matrix(directory / "plain", steps=(steps[2], steps[2]))
    assert drawn_cells(figures_of(one)["matrix"]) == pytest.approx(
        {(row.sender, row.receiver): row.wire_bytes for row in frame.itertuples() if row.wire_bytes}
    )


def test_filters_that_counters_do_not_know_are_disabled(directory):
    def dead(query):
        return {
            part.id["key"]
            for root in draw(directory, f"/matrix?run=plain{query}")
            for part in (root, *root._traverse())
            if getattr(part, "disabled", None) is True
        }

    assert dead("") == set()
    assert dead("&measure=counters") == {"op", "purpose", "steps"}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """Return a directory with a run with experts and a run without experts."""
    base = tmp_path_factory.mktemp("uneven")
    uneven_experts().write(base / "run")
    SyntheticRun(2).write(base / "dense")
    return base


EXPERT_CARDS = {"experts", "expert-imbalance", "expert-drops", "expert-bytes"}


def test_the_cards_of_experts_draw_what_the_api_answers(uneven):
    parts = draw(uneven, "/matrix?run=run")
    figures, text = figures_of(parts), text_of(parts)
    loads = api.experts(uneven / "run").query("layer == 'blocks.0.moe'")
    heat = figures["experts"].data[0]
    assert [list(row) for row in heat.z] == loads.pivot(
        index="expert", columns="step", values="load"
    ).to_numpy().tolist()
    assert heat.z[5][11] == 4.5 and "4.50 in step 7, expert 5" in text
    assert "<b>4.50</b> times the mean: 144 tokens, 80 dropped" in heat.customdata[5][7]
    lines = {trace.name: list(trace.y) for trace in figures["expert-imbalance"].data}
    rows = api.expert_imbalance(uneven / "run").query("layer == 'blocks.0.moe'")
    assert lines == {
        "most loaded expert": rows["imbalance"].tolist(),
        "most loaded rank": rows["rank_imbalance"].tolist(),
    }
    assert list(figures["expert-drops"].data[0].y) == pytest.approx((100 * rows["dropped_share"]).tolist())
    sent = {trace.name: list(trace.y) for trace in figures["expert-bytes"].data}
    # There are 8 exchanges. Each rank sends a quarter of 4096 bytes to one rank of its host and two quarters
    # to the other host.
    assert sent == {"within hosts": [8 * 4 * 1024.0] * 12, "between hosts": [8 * 4 * 2048.0] * 12}
    assert "all ranks receive the same" in text


def test_overview_and_traffic_matrix_begin_with_the_load_of_experts(uneven):
    summary = api.expert_summary(uneven / "run")
    worst = summary.layers[0]
    for page in ("/overview", "/matrix"):
        text = text_of(draw(uneven, f"{page}?run=run"))
        assert "Experts are unevenly loaded" in text
        assert (
            f"{worst.layer}: the expert that most tokens chose has {worst.imbalance:.2f} times the mean"
            in text
        )
        assert f"{summary.dropped_share:.1%} of the choices were dropped." in text
        assert "loaded" not in text_of(draw(uneven, f"{page}?run=dense"))


def test_the_layer_and_the_steps_of_the_cards_of_experts_can_be_chosen(uneven):
    parts = draw(uneven, "/matrix?run=run&layer=blocks.1.moe&steps=2-3")
    heat = figures_of(parts)["experts"].data[0]
    assert [list(row) for row in heat.z] == [[1.0, 1.0]] * 8
    assert "Experts: load of blocks.1.moe" in text_of(parts)
    assert "No experts were recorded in these steps" in text_of(draw(uneven, "/matrix?run=run&steps=-1"))


def test_many_steps_are_added_up_in_columns(uneven, monkeypatch):
    monkeypatch.setattr(expert_charts, "MOST_STEPS", 5)
    parts = draw(uneven, "/matrix?run=run")
    heat = figures_of(parts)["experts"].data[0]
    assert len(heat.x) == 4 and "Each column is 3 neighboring steps together" in text_of(parts)
    assert heat.z[5][1] == (8 + 15 + 22) / 24  # The values are for steps 3 to 5.


def test_uneven_splits_are_stated_beside_the_matrix_and_without_experts_there_is_no_card(tmp_path):
    run = SyntheticRun(world_size=2)
    for step, (first, second) in enumerate([(100, 100), (100, 300)]):
        run.add_step(step)
        for rank, (sent, got) in enumerate([((50, second), (50, first)), ((first, 50), (second, 50))]):
            run.add_collective(
                "all_to_all", payload_bytes=sum(sent), step=step, ranks=(rank,),
                input_splits=",".join(map(str, sent)), output_splits=",".join(map(str, got)),
            )  # fmt: skip
    run.write(tmp_path / "run")
    parts = draw(tmp_path, "/matrix?run=run&steps=0-1")
    assert (
        "step 1 rank 1 receives 1.50 times the mean of the ranks (the most of 2 steps, median 1.25)"
        in text_of(parts)
    )
    assert not EXPERT_CARDS & set(figures_of(parts)) and "Experts" not in text_of(parts)


def test_neighbouring_ranks_of_a_host_have_a_frame():
    frame = pd.DataFrame({"sender": [0, 3], "receiver": [3, 0], "wire_bytes": [8.0, 8.0]})
    frame.attrs = {"ranks": 4, "ranks_per_cell": 1}
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    frames = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", None, "light", hosts).layout.shapes
    assert [(one.x0, one.x1, one.y0, one.y1) for one in frames] == [
        (-0.5, 1.5, -0.5, 1.5),
        (1.5, 3.5, 1.5, 3.5),
    ]
    assert not matrix_chart.heat(
        frame, "wire_bytes", "Wire bytes", None, "light", dict.fromkeys(hosts, "a")
    ).layout.shapes


def late_run(path, ranks=3, since=3, steps=12, late=(1,)):
    """Write a run in which the ranks ``late`` arrive 5 ms late from step ``since`` on.

    In step 0 they are 20 ms late.
    """
    run = SyntheticRun(ranks)
    for step in range(steps):
        begin = (step + 1) * 100_000_000
        run.add_step(step, begin_ns=begin, duration_ns=90_000_000)
        for rank in range(ranks):
            delay = 20_000_000 if step == 0 else 5_000_000 if step >= since else 0
            delay = delay if rank in late else 0
            run.add_collective(
                "all_reduce", step=step, ranks=(rank,), issue_ns=begin + delay + rank, host_ns=40_000_000 - delay,
                payload_bytes=8, purpose="gradient_reduce",
            )  # fmt: skip
    run.write(path)


def test_stragglers_are_shown_without_the_first_step_unless_asked(tmp_path):
    late_run(tmp_path / "run")
    warm = api.straggling(tmp_path / "run", first_step=False)
    assert warm.collectives["step"].min() == 1 and len(warm.collectives) == 11
    assert warm.ranks["collectives"].tolist() == [11, 11, 11]
    text = text_of(draw(tmp_path, "/stragglers?run=run"))
    assert "20.0 ms" not in text and "5.00 ms" in text
    parts = draw(tmp_path, "/stragglers?run=run&first=in")
    assert "20.0 ms" in text_of(parts)
    assert list(figures_of(parts)["lateness-steps"].data[-1].x) == list(range(12))


def test_alignment_offers_its_commands_only_where_they_help(directory, tmp_path):
    on_gloo = text_of(draw(directory, "/alignment?run=on-gloo"))
    assert "gloo, which writes no log" in on_gloo and "commprof align" not in on_gloo
    SyntheticRun(2, state="failed").write(tmp_path / "empty")
    empty = text_of(draw(tmp_path, "/alignment?run=empty"))
    assert "This run has no records" in empty and "commprof align" not in empty


def test_records_speaks_of_the_first_step_only_where_it_is_left_out(tmp_path):
    late_run(tmp_path / "run")
    said = "The first step is left out until you clear the filter"
    assert said in text_of(draw(tmp_path, "/records?run=run"))
    for query in ("&filter=", "&filter=rank:=:1", "&step=3"):
        assert said not in text_of(draw(tmp_path, f"/records?run=run{query}")), query


def rows_of_card(parts, name):
    """Return the rows of the table in a card by heading, as a browser shows them."""
    cards = [part for root in parts for part in (root, *root._traverse()) if getattr(part, "id", "") == name]
    table = next(part for part in cards[0]._traverse() if type(part).__name__ == "Table")
    if getattr(table, "data", None):
        head, body = table.data["head"], table.data["body"]
        return [dict(zip(head, row, strict=True)) for row in body]
    head, *body = [
        [shown_text(cell) for cell in row.children] for row in table._traverse() if type(row).__name__ == "Tr"
    ]
    return [dict(zip(head, row, strict=True)) for row in body]


def shown_text(part):
    """Return the text of a component."""
    children = getattr(part, "children", part)
    children = children if isinstance(children, list) else [children]
    return "".join(each if isinstance(each, str) else shown_text(each) for each in children)


def test_the_table_of_stragglers_has_the_numbers_of_the_sentence(tmp_path, capsys):
    late_run(tmp_path / "run", since=5)
    parts = draw(tmp_path, "/stragglers?run=run")
    assert execute(["report", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    row = rows_of_card(parts, "card-stragglers")[0]
    assert (row["Rank"], row["Straggler"], row["Arrived last"], row["Compared"]) == ("1", "yes", "7", "11")
    assert row["Waited for its own delay"] == api.format_ns(5_000_000 * 7 / 11)
    assert f"waited {row['Waited for its own delay']} per step for its own delay" in said
    assert f"arrived last in {100 * 7 / 11:.0f} % of {row['Compared']} collectives" in said
    assert "from step 5 on" in said and '"Stragglers' not in said
    assert "mean of 11 steps, after the first step" in text_of(parts)


def test_the_lateness_over_the_steps_marks_the_late_rank_and_its_first_late_step(tmp_path):
    late_run(tmp_path / "run", ranks=4, since=5, late=(2,))
    figure = figures_of(draw(tmp_path, "/stragglers?run=run"))["lateness-steps"]
    grey, late = figure.data
    assert (grey.name, late.name) == ("ranks 0, 1, 3", "rank 2")
    assert grey.line.color != late.line.color
    assert list(late.x) == list(range(1, 12))
    assert list(late.y) == [*[2.0] * 4, *[5_000_002.0] * 7]
    assert [note.text for note in figure.layout.annotations] == ["rank 2 late from step 5 on"]
    assert [(line.x0, line.x1) for line in figure.layout.shapes] == [(5, 5)]


def test_of_many_ranks_those_that_are_not_late_are_a_band(tmp_path):
    late_run(tmp_path / "run", ranks=20, late=(13,))
    parts = draw(tmp_path, "/stragglers?run=run")
    band, median, late = figures_of(parts)["lateness-steps"].data
    assert (band.fill, median.name, late.name) == ("toself", "their median", "rank 13")
    assert max(late.y) == 5_000_013 and max(band.y) == 19
    assert "The other 19 ranks kept nobody waiting." in text_of(parts)


def test_nobody_late_is_drawn_grey_and_a_run_without_steps_has_no_such_chart(tmp_path):
    late_run(tmp_path / "even", late=())
    figure = figures_of(draw(tmp_path, "/stragglers?run=even"))["lateness-steps"]
    assert [trace.name for trace in figure.data] == ["ranks 0, 1, 2"] and not figure.layout.shapes
    run = SyntheticRun(2)
    run.add_collective("all_reduce", payload_bytes=4, step=-1)
    run.write(tmp_path / "stepless")
    parts = draw(tmp_path, "/stragglers?run=stepless")
    assert "lateness-steps" not in figures_of(parts) and "lateness" in figures_of(parts)
    assert "in all." in text_of(parts)


def test_buckets_draw_what_the_api_answers(directory):
    figures = figures_of(draw(directory, "/buckets?run=plain&step=4"))
    frame = api.bucket_flushes(directory / "plain")
    frame = frame[frame["step"] == 4]
    bars = figures["bucket-sizes"].data[0]
    assert (bars.name, list(bars.y)) == ("reduce", [24_000.0, 16_000.0])
    assert list(figures["bucket-times"].data[0].y) == [float(value) for value in frame["duration_ns"]]
    means = figures_of(draw(directory, "/buckets?run=plain"))["bucket-times"]
    # There are two reduces of 50,000 each, which begin 100,000 apart.
    assert list(means.data[0].y) == [150_000.0, 150_000.0]


def test_the_numbers_of_the_buckets_name_their_statistic(directory):
    parts = draw(directory, "/buckets?run=plain&bucket=1")
    text, rows = text_of(parts), rows_of_card(parts, "card-buckets")
    assert (
        "Bytes, fill and counts are means over the steps; times are medians over the steps after the first."
        in text
    )
    assert [row["Bucket"] for row in rows] == ["0", "1"]
    assert (rows[0]["Parameters"], rows[0]["Fill"]) == ("embedding.weight", "100%")
    assert [row["Sent because"] for row in rows] == ["next gradient did not fit", "end of the backward pass"]
    means = api.bucket_means(directory / "plain")
    assert [row["Took, median"] for row in rows] == [api.format_ns(each) for each in means["duration_ns"]]
    assert "Median over the steps after the first" in text and "Mean over the steps: bytes" in text
    assert "end of the backward pass: 1, next gradient did not fit: 1 (buckets of a mean step)" in text
    assert "Bucket 1 of step 11, the last step with this bucket: its parameters" in text
    parts = draw(directory, "/buckets?run=plain&step=4")
    text, rows = text_of(parts), rows_of_card(parts, "card-buckets")
    assert "times are means over the ranks" in text and "Took" in rows[0] and "median" not in text
    assert "Bucket 0 of step 4: its parameters" in text and "The buckets of step 4" in text


def test_a_whole_column_of_the_bucket_charts_is_a_place_to_click(directory):
    figures = figures_of(draw(directory, "/buckets?run=plain"))
    assert {figures[name].layout.hovermode for name in ("bucket-sizes", "bucket-times")} == {"x"}


@pytest.mark.sampled
@pytest.mark.parametrize(("capacity", "drawn"), [(2000, True), (500_000_000, False)])
def test_a_capacity_that_would_hide_the_buckets_is_told_and_not_drawn(tmp_path, capacity, drawn):
    run = SyntheticRun(2)
    run.add_step(0)
    for rank in range(2):
        run.add(
            "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=0, micro_step=0, bucket=0, numel=1000, bytes=4000,
            capacity=capacity, dtype="float32", time_ns=1,
        )  # fmt: skip
    run.write(tmp_path / "run")
    parts = draw(tmp_path, "/buckets?run=run")
    figure = figures_of(parts)["bucket-sizes"]
    assert ("full" in [trace.name for trace in figure.data]) is drawn
    assert figure.layout.yaxis.range[1] < (10_000 if drawn else 5000)
    told = "dashes: its capacity" if drawn else "its capacity, 1.86 GiB, is far above what is drawn"
    assert told in text_of(parts)


def test_a_bucket_of_the_address_shows_its_parameters_and_records(directory):
    text = text_of(draw(directory, "/buckets?run=plain&step=4&bucket=1"))
    assert "Bucket 1 of step 4: its parameters" in text
    assert '"head.bias"' in text and '"3,000"' in text
    content = api.bucket_content(directory / "plain", 4, 1)
    records, names = content.operations, content.parameters["name"].tolist()
    # The text is the line above the tiles.
    first = text.partition("Buckets of the step")[0].partition('"Bucket 1"')[2]
    assert names[0] in first and names[-1] in first
    assert "4,000 elements" in first and api.format_bytes(16_000) in first
    assert all(f"filter=rank%3A%3D%3A0&filter=seq%3A%3D%3A{seq}" in text for seq in records["seq"])


def two_stages(path):
    """Write a run in which two stages have a bucket 0 in two micro-batches.

    The buckets have different sizes and parameters.
    """
    run = SyntheticRun(4)
    run.add_step(0, duration_ns=1_000_000)
    for number, (members, numel) in enumerate((((0, 1), 1000), ((2, 3), 250))):
        for micro in range(2):
            for rank in members:
                run.add(
                    "buckets", rank=rank, attempt=0, pid=run.pid(rank), step=0, micro_step=micro, bucket=0, numel=numel,
                    bytes=4 * numel, dtype="float32", parameters=f"of.stage.{number}", time_ns=1,
                )  # fmt: skip
            run.add_collective(
                "all_reduce", payload_bytes=4 * numel, bucket=0, micro_step=micro, group=members, pg=f"data{number}",
                purpose="gradient_reduce",
            )  # fmt: skip
    return run.write(path)


def test_buckets_of_two_stages_are_not_mixed(tmp_path):
    two_stages(tmp_path / "run")
    for group, sizes, name in (("0-1", [4000.0] * 2, "of.stage.0"), ("2-3", [1000.0] * 2, "of.stage.1")):
        drawing = draw(tmp_path, f"/buckets?run=run&group={group}")
        assert list(figures_of(drawing)["bucket-sizes"].data[0].y) == sizes
        text = text_of(drawing)
        assert f"Only the buckets that ranks {group} reduce" in text and f'"{name}"' in text
        assert "Ranks that reduce it" in text
    assert '"of.stage.1"' not in text_of(draw(tmp_path, "/buckets?run=run"))


def test_a_link_of_a_record_finds_its_bucket(tmp_path, directory):
    two_stages(tmp_path / "run")
    text = text_of(draw(tmp_path, "/buckets?run=run&group=3&step=0&bucket=1.0"))
    assert "Bucket 1.0 of step 0: its parameters" in text and '"of.stage.1"' in text
    # With one micro-batch, the page omits the micro-batch from the names of buckets.
    assert "Bucket 1 of step 4: its parameters" in text_of(
        draw(directory, "/buckets?run=plain&step=4&bucket=0.1")
    )


def test_a_run_without_buckets_says_who_publishes_them(tmp_path):
    run = SyntheticRun(2)
    run.add_collective("all_reduce", payload_bytes=4)
    run.write(tmp_path / "run")
    text = text_of(draw(tmp_path, "/buckets?run=run"))
    assert "No gradient buckets" in text and "commprof run train.py" in text


def test_the_buckets_of_a_run_of_sums_say_why_their_times_are_not_known(tmp_path):
    """No data is missing, because sums have no bucket numbers."""
    with_sums(detailed_run()).write(tmp_path / "sums")
    parts = draw(tmp_path, "/buckets?run=sums")
    text = text_of(parts)
    assert text.count("Not known: only sums per step were recorded (--aggregate") == 2
    assert "only sums were recorded, without bucket numbers" in text
    assert "o record has" not in text and "Took, median" not in text


def test_overview_asks_for_no_step_call_in_imported_files(tmp_path):
    import_kineto(tmp_path)
    text = text_of(draw(tmp_path, "/overview?run=imported-kineto"))
    assert "This run has no training steps: the imported files name none." in text
    assert "commprof.step()" not in text and "means per step" not in text
    duration = text.partition('"Duration"')[2]
    assert '"not known"' in duration[: duration.index('"Ranks"')]


def test_the_straggler_is_named_with_links_to_the_timeline_and_its_record(directory):
    parts = draw(directory, "/stragglers?run=plain")
    text, figures = text_of(parts), figures_of(parts)
    assert "There is a straggler" in text and "Rank 2 is a straggler: it arrived last in 100 %" in text
    found = api.straggling(directory / "plain", first_step=False)
    assert list(figures["lateness"].data[0].median) == [float(v) for v in found.lateness["median_ns"]]
    drawn = {trace.name.partition(":")[0].replace(" ", "_"): sum(trace.y) for trace in figures["causes"].data}
    assert drawn == found.causes.groupby("cause")["time_ns"].sum().astype(float).to_dict()
    worst = found.collectives.iloc[0]
    assert (worst["op"], worst["last_rank"]) == ("all_gather", 2)
    assert "/timeline?run=plain&from=" in text
    assert f"filter=rank%3A%3D%3A2&filter=seq%3A%3D%3A{worst['seq']}" in text


@pytest.mark.long
def test_the_links_of_late_collectives_show_them_on_the_timeline(directory):
    parts = draw(directory, "/stragglers?run=plain")
    found = api.straggling(directory / "plain", first_step=False).collectives
    hrefs = [
        part.href
        for root in parts
        for part in root._traverse()
        if isinstance(part, dcc.Link) and part.href.startswith("/timeline")
    ]
    assert len(hrefs) == min(50, len(found))  # The table shows the 50 collectives with the largest skew.
    for href, row in zip(hrefs, found.to_dict("records")[:50], strict=True):
        view = view_in(parse(href.partition("?")[2]))
        extent = api.index(directory / "plain")
        begin, end = extent["begin_ns"] + view.begin_ns, extent["begin_ns"] + view.end_ns
        assert begin <= row["begin_ns"] <= row["end_ns"] <= end
        bars = api.timeline(directory / "plain", begin, end, 800).bars
        assert row["op"] in set(bars["op"])


@pytest.mark.long
def test_a_record_of_the_timeline_is_found_in_the_alignment(directory):
    rows = api.alignment(directory / "aligned").rows
    row = rows[rows["seq"].notna()].iloc[-1]
    place = record_text(int(row[name]) for name in ("rank", "attempt", "record_pid", "seq"))
    text = text_of(draw(directory, f"/alignment?run=aligned&record={place}"))
    assert f"Records beside lines: rank {row['rank']}, group {row['pg']}" in text
    shown = text.partition("side-by-side")[2]
    assert str(int(row["line"])) in shown or str(int(row["seq"])) in shown
    for nonsense in ("1.2.3", "9.9.9.9", "x"):
        assert "could not be drawn" not in text_of(
            draw(directory, f"/alignment?run=aligned&record={nonsense}")
        )


@pytest.mark.long
def test_an_alignment_is_drawn_with_its_first_divergence(directory):
    parts = draw(directory, "/alignment?run=aligned")
    counts = api.alignment_summary(directory / "aligned").counts.groupby("state")["lines"].sum()
    text = text_of(parts)
    assert "Records and log differ" in text
    assert f"{counts['matched']:,} of {counts.sum():,} records and lines match" in text
    assert f"{counts['missing']:,} records have no line" in text
    text, figures = text_of(parts), figures_of(parts)
    found = api.alignment(directory / "aligned")
    states = found.counts.groupby("state")["lines"].sum().to_dict()
    assert {trace.name: sum(trace.y) for trace in figures["states"].data} == states
    assert states["missing"] == 3
    first = found.divergences.iloc[0]
    assert f"Records beside lines: rank {first['rank']}" in text
    assert f"at={first['matched_before']}" in text
    assert "certain" in text
    ring = api.topology(directory / "aligned")
    ring = ring[ring["kind"] == "ring"]
    assert list(figures["topology-ring"].data[1].text) == ["0", "2", "1", "3"]
    assert len(ring) == 4 == len(figures["topology-ring"].data[0].x) / 3
    assert list(figures["topology-tree"].data[1].text) == ["0", "1", "2", "3"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "query", ["state=missing", "state=torn", "at=99999999", "at=x", "rank=77", "group=no", "channel=9"]
)
def test_no_place_of_an_alignment_brings_the_page_down(directory, query):
    assert "could not be drawn" not in text_of(draw(directory, f"/alignment?run=aligned&{query}"))


def test_an_alignment_with_a_generated_log_says_so(directory):
    said = "The log of this alignment states that it was generated: it is not output of NCCL."
    assert said in text_of(draw(directory, "/alignment?run=aligned"))
    aligned_run(directory / "unmarked", is_marked=False)
    text = text_of(draw(directory, "/alignment?run=unmarked"))
    assert said not in text and "Records beside lines" in text


def test_without_an_alignment_the_command_is_said(directory):
    text = text_of(draw(directory, "/alignment?run=plain"))
    assert "Not aligned with an NCCL log" in text and "commprof align " in text


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
def test_a_run_of_one_rank_that_goes_on_and_one_without_records_are_drawn(tmp_path, monkeypatch, path):
    alone = SyntheticRun(1)
    alone.add_step(0, duration_ns=100)
    alone.add_collective("all_reduce", payload_bytes=4, step=0, purpose="gradient_reduce")
    alone.write(tmp_path / "alone")
    SyntheticRun(2).write(tmp_path / "empty")
    monkeypatch.setattr(Runs, "is_going", lambda runs, names: names == ["alone"])
    assert "This run is still being recorded" in text_of(draw(tmp_path, f"{path}?run=alone"))
    for name in ("alone", "empty"):
        assert "could not be drawn" not in text_of(draw(tmp_path, f"{path}?run={name}"))


@pytest.mark.sampled
@pytest.mark.parametrize("path", PATHS)
def test_a_hostile_trace_is_text(tmp_path, path):
    run = SyntheticRun(2, backend="nccl")
    run.add_step(0, begin_ns=-5_000_000, duration_ns=100)
    for op in ("all_reduce", "reduce"):
        run.add_collective(
            op, payload_bytes=400, pg=HOSTILE, peer=0, purpose="gradient_reduce", bucket=0, issue_ns=-4_000_000,
            parameters=HOSTILE,
        )  # fmt: skip
    run.add("buckets", rank=0, attempt=0, pid=1000, step=0, micro_step=0, bucket=0, numel=100, bytes=400, capacity=0,
            dtype=HOSTILE, owners=HOSTILE, parameters=HOSTILE, flush_reason=HOSTILE, time_ns=-1)  # fmt: skip
    run.add("matches", state="missing", rank=0, attempt=0, record_pid=1000, seq=0, pg=HOSTILE, op="all_reduce",
            record_bytes=400, reason=HOSTILE)  # fmt: skip
    run.add("nccl_rings", host=HOSTILE, pid=1, comm=HOSTILE, channel=0, ranks="0 1", file=HOSTILE, line=1)
    run.write(tmp_path / "run")
    parts = draw(tmp_path, f"{path}?run=run")
    assert "could not be drawn" not in text_of(parts)
    for figure in figures_of(parts).values():
        assert "<script" not in figure.to_json().replace("\\u003c", "<")


def test_ranks_have_ticks_at_whole_numbers_only():
    assert list(rank_charts.rank_axis([0, 1, 2, 3])["tickvals"]) == [0, 1, 2, 3]
    assert len(rank_charts.rank_axis(range(1000))["tickvals"]) <= 12


def test_cells_of_many_ranks_say_which_they_are():
    frame = pd.DataFrame({"sender": [0, 16], "receiver": [16, 0], "wire_bytes": [8.0, 1024.0]})
    frame.attrs = {"ranks": 30, "ranks_per_cell": 16}
    figure = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", "reduce", "dark")
    assert list(figure.layout.xaxis.ticktext) == ["0-15", "16-29"]
    assert [list(row) for row in figure.data[0].z] == [[None, 3.0], [10.0, None]]
    assert "Rank 0-15 to rank 16-29" in figure.data[0].customdata[0][1]


def test_long_names_of_receivers_are_not_turned_into_the_title():
    """With 256 ranks, the rotated names overlapped the title of the axis.

    The title of the axis then overlapped the title of the colors.
    """
    firsts = range(0, 256, 4)
    frame = pd.DataFrame({"sender": [*firsts], "receiver": [*reversed(firsts)], "wire_bytes": 8.0})
    frame.attrs = {"ranks": 256, "ranks_per_cell": 4}
    layout = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", None, "light").layout
    assert len(layout.xaxis.ticktext) == 5 and len(layout.yaxis.ticktext) > 5


def test_equal_cells_have_a_colour_and_a_tick():
    frame = pd.DataFrame({"sender": [0, 1], "receiver": [1, 0], "wire_bytes": [1000.0, 1000.0]})
    frame.attrs = {"ranks": 2, "ranks_per_cell": 1}
    heat = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", None, "light").data[0]
    assert heat.zmin < heat.zmax == math.log2(1000)
    assert len(heat.colorbar.tickvals) == 1 and heat.zmin < heat.colorbar.tickvals[0] < heat.zmax
    frame["wire_bytes"] = [1100.0, 2000.0]  # There is no power of two between the two values.
    heat = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", None, "light").data[0]
    assert list(heat.colorbar.ticktext) == ["1.07 KiB", "1.95 KiB"]


def test_a_ring_with_a_gap_and_a_tree_with_two_roots_are_drawn():
    broken = pd.DataFrame({"from_rank": [0, 3], "to_rank": [1, 0]})
    assert set(topology_chart.ring(broken, "light").data[1].text) == {"0", "1", "3"}
    forest = pd.DataFrame({"from_rank": [0, 2, 4, 5], "to_rank": [1, 3, 5, 4]})
    assert set(topology_chart.tree(forest, "dark").data[1].text) == {"0", "1", "2", "3", "4", "5"}


def test_states_and_causes_are_told_apart_without_their_colour():
    for looks in (
        [hatch for _, hatch in alignment_chart.STATES.values()],
        [c[2] for c in lateness_chart.CAUSES.values()],
    ):
        assert len(set(looks)) == len(looks)


def test_report_overview_and_stragglers_say_the_same_verdict(directory, capsys):
    verdict = api.stragglers(directory / "plain").attrs["statement"]
    assert "is a straggler" in verdict
    assert execute(["report", str(directory / "plain")]) == 0
    assert verdict in " ".join(capsys.readouterr().out.split())
    for address in ("/overview?run=plain", "/stragglers?run=plain"):
        assert json.dumps(verdict)[1:-1] in text_of(draw(directory, address)), address


@pytest.mark.parametrize(("ranks", "written"), [(16, "%{text}"), (17, None)])
def test_a_matrix_of_few_ranks_shows_the_bytes_in_its_cells(ranks, written):
    frame = pd.DataFrame({"sender": [0], "receiver": [1], "wire_bytes": [3 * 2**20]})
    frame.attrs.update(ranks=ranks, ranks_per_cell=1)
    heat = matrix_chart.heat(frame, "wire_bytes", "Wire bytes", None, "light").data[0]
    assert heat.texttemplate == written
    assert heat.text[0][1] == "3.00 MiB" and heat.text[1][0] == ""


def test_a_matrix_per_step_leaves_out_the_step_in_which_a_run_failed(tmp_path):
    run = SyntheticRun(2, state="failed")
    for step in range(4):
        run.add_step(step, **({"end_ns": None} if step == 3 else {}))
        run.add_collective("all_reduce", payload_bytes=1000 if step < 3 else 100, step=step)
    run.write(tmp_path / "run")
    parts = draw(tmp_path, "/matrix?run=run")
    assert "per step, mean of the 2 steps 1 to 2" in text_of(parts)
    assert list(drawn_cells(figures_of(parts)["matrix"]).values()) == pytest.approx([1000, 1000])


def test_a_matrix_per_step_counts_a_repeated_step_twice(tmp_path):
    run = SyntheticRun(2)
    for attempt, steps in enumerate((range(3), range(2, 4))):
        for step in steps:
            run.add_step(step, attempt=attempt)
            run.add_collective("all_reduce", payload_bytes=1000, step=step, attempt=attempt)
    run.write(tmp_path / "run")
    parts = draw(tmp_path, "/matrix?run=run")
    assert list(drawn_cells(figures_of(parts)["matrix"]).values()) == pytest.approx([1000, 1000])


def test_the_owners_say_of_which_steps_their_bytes_are(directory):
    assert "as the root of reduces in step 3." in text_of(draw(directory, "/matrix?run=plain&steps=3"))
    assert "as the root of reduces in the whole run." in text_of(
        draw(directory, "/matrix?run=plain&per=total")
    )


def test_stragglers_of_a_single_step_do_not_claim_that_it_was_left_out(tmp_path):
    run = SyntheticRun(2)
    run.add_step(0)
    for rank in range(2):
        run.add_collective(
            "all_reduce", payload_bytes=1000, step=0, ranks=(rank,), issue_ns=2_000_000 + 9_000 * rank
        )
    run.write(tmp_path / "run")
    parts = draw(tmp_path, "/stragglers?run=run")
    text = text_of(parts)
    assert "per step, mean of one step. " in text and "With the first step, since there is no other." in text
    assert "after the first step" not in text and "without the first step" not in text
    assert "too many to read" not in text
    assert list(figures_of(parts)["lateness-steps"].layout.xaxis.tickvals) == [0]
