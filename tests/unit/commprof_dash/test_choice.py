"""Test which runs the page Compare shows if the address names none.

The page shows one sweep, or the runs of one program and model, and never a mixture.
"""

import json

import pytest
from plotly.utils import PlotlyJSONEncoder

from commprof_dash.app import draw_page, find_page
from commprof_dash.data import Runs
from commprof_dash.pages.compare.choice import choices
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

HOUR_NS = 3_600_000_000_000
BUCKET = "zero_optimization.reduce_bucket_size"


def write(path, hour, sweep=None, point=None, numel=1000, script="train.py", world=2, state="complete"):
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": (point or {}).get(BUCKET, 1)}}
    run = SyntheticRun(
        world,
        config=config,
        script=script,
        started_realtime_ns=1_700_000_000_000_000_000 + hour * HOUR_NS,
        sweep=None if sweep is None else {"name": sweep, "point": point, "repeat": 0},
        state=state,
    )
    run.add_parameters({"weight": numel})
    for step in range(3):
        run.add_step(step, duration_ns=1_000_000)
        run.add_collective("all_reduce", payload_bytes=1000, step=step, purpose="gradient_reduce")
    run.write(path)


def sweep(base, name, hour, sizes=(1, 2), **more):
    for place, size in enumerate(sizes):
        write(base / name / f"{size}-0", hour + place, name, {BUCKET: size}, **more)


def compare(base, search=""):
    _, drawing = draw_page(find_page("/compare"), Runs(base), "/compare", search, "light")
    return drawing


def chosen(drawing):
    (line,) = [part for part in drawing.body if getattr(part, "className", "") == "compared muted"]
    return json.loads(json.dumps(line, cls=PlotlyJSONEncoder))["props"]["children"]


def texts(parts):
    return "".join(part if isinstance(part, str) else part["props"]["children"] for part in parts)


def links(parts):
    return {part["props"]["children"]: part["props"]["href"] for part in parts if not isinstance(part, str)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a directory that no test changes.

    The directory has two sweeps of one program and model, one sweep of a different model, and a run of a
    different program.
    """
    path = tmp_path_factory.mktemp("base")
    sweep(path, "old", 0)
    return without_old(path)


@pytest.fixture
def own(tmp_path):
    """Return a copy without the oldest sweep, for a test that adds runs."""
    return without_old(tmp_path)


def without_old(path):
    sweep(path, "large", 10, numel=5000)
    write(path / "other", 20, script="other.py")
    sweep(path, "new", 30)
    return path


def test_the_newest_sweep_is_compared_and_the_others_are_links(base):
    drawing = compare(base)
    parts = chosen(drawing)
    assert texts(parts) == (
        "Compared: sweep new (2 runs). Others: train.py, 2 ranks, 1,000 parameters (4 runs), sweep large (2 runs), "
        "sweep old (2 runs), all runs (7 runs)."
    )
    assert drawing.kept == ("of", "sweep:new")
    shown = json.dumps([*drawing.body], cls=PlotlyJSONEncoder)
    assert "new/1-0" in shown and "old/1-0" not in shown and "run=other" not in shown
    assert links(parts)["sweep old (2 runs)"] == "/compare?of=sweep%3Aold"


def test_a_link_leads_to_what_it_names(base):
    for name, href in links(chosen(compare(base))).items():
        assert texts(chosen(compare(base, href.removeprefix("/compare")))).startswith(f"Compared: {name}. ")


def test_of_a_newest_run_without_a_sweep_its_program_and_model_are_compared(own):
    write(own / "alone", 40, numel=5000)
    assert texts(chosen(compare(own))).startswith(
        "Compared: train.py, 2 ranks, 5,000 parameters (3 runs). Others: sweep new (2 runs)"
    )


def test_a_sweep_of_one_setting_is_compared_with_the_program(own):
    sweep(own, "scatter", 40, sizes=(9,))
    assert texts(chosen(compare(own))).startswith("Compared: train.py, 2 ranks, 1,000 parameters (3 runs).")


def test_two_sweeps_at_a_time_do_not_take_turns(own):
    sweep(own, "first", 50, sizes=(1, 2))
    sweep(own, "second", 51, sizes=(1, 2))
    write(own / "first" / "3-0", 60, "first", {BUCKET: 3}, state="running")
    assert choices(Runs(own))[0].text == "sweep second"


def test_one_named_run_is_shown_alone_with_links_to_its_sweep_and_program(base):
    drawing = compare(base, "?run=old/1-0&measure=payload")
    parts = chosen(drawing)
    assert texts(parts).startswith(
        "One run is chosen, old/1-0. Compare it with others: sweep old (2 runs), train.py, 2 ranks, "
        "1,000 parameters (4 runs)"
    )
    assert links(parts)["sweep old (2 runs)"] == "/compare?measure=payload&of=sweep%3Aold"
    assert drawing.kept is None


def test_several_named_runs_have_no_line_and_an_unknown_choice_is_the_default(base):
    drawing = compare(base, "?run=old/1-0&run=other")
    assert not [part for part in drawing.body if getattr(part, "className", "") == "compared muted"]
    assert texts(chosen(compare(base, "?of=sweep:gone"))).startswith("Compared: sweep new")
