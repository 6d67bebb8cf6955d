"""Test the page Plan without a browser.

The page shows the output of ``commprof plan`` and refuses bad input with one line.
"""

import inspect
import json
import shlex
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
from dash import dcc
from plotly.utils import PlotlyJSONEncoder

from commprof.calibration.file import write_calibration
from commprof.cli import execute
from commprof.cli.verbs.plan import plan as plan_verb
from commprof.plan import api as plan_api
from commprof_dash import ids
from commprof_dash.app import draw_page, find_page
from commprof_dash.components import controls
from commprof_dash.data import Runs
from commprof_dash.pages.plan import data as plan_data
from commprof_dash.pages.plan import page as page_module
from support.calibrations import made_calibration
from support.runs import SyntheticRun

pytestmark = pytest.mark.shared_answers

CONFIG = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
RECORDED = Path(__file__).resolve().parents[2] / "golden" / "h100" / "zero_stage2"
HOSTILE = "<script>alert(1)</script>"


def draw(directory, **values):
    search = "?" + "&".join(f"{key}={quote(text)}" for key, text in values.items())
    _, drawing = draw_page(find_page("/plan"), Runs(directory), "/plan", search, "light")
    return [*drawing.controls, *drawing.body]


def choices_of(components, key):
    """Return the values that a list of the form offers."""
    for root in components:
        for part in root._traverse():
            if getattr(part, "id", None) == ids.control(key):
                return [choice["value"] for choice in part.data]
    raise AssertionError(f"the form has no field {key}")


def text_of(components):
    return json.dumps(list(components), cls=PlotlyJSONEncoder)


def notice_of(components):
    """Return the text of the only notice, which replaces the cards."""
    (alert,) = [part for part in components if "message" in (getattr(part, "className", None) or "")]
    return alert.children[0].children


def figures_of(components):
    return {
        part.id["name"]: part.figure
        for root in components
        for part in root._traverse()
        if isinstance(part, dcc.Graph)
    }


def printed(tmp_path, capsys, world, *words, config=CONFIG):
    """Return the settings that ``commprof plan --json`` prints."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert execute(["plan", str(path), "--model", "params:1e8", "--world", str(world), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["settings"]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_figures_hold_what_the_command_prints(tmp_path, capsys, stage):
    words = ("--set", f"zero_optimization.stage={stage}", "--sequence", "128")
    figures = figures_of(
        draw(
            tmp_path,
            config=json.dumps(CONFIG),
            model="params:1e8",
            world="8",
            sequence="128",
            set=f"zero_optimization.stage={stage}",
        )
    )
    traffic, memory = (
        {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figures[name].data}
        for name in ("plan-traffic", "plan-memory")
    )
    del memory["memory of a device"]
    peaks = memory.pop("peak, alive at once")
    for world in (1, 8, 1024, 16384):
        (setting,) = printed(tmp_path, capsys, world, *words)
        wire = {}
        for row in setting["traffic"]:
            wire[row["purpose"]] = wire.get(row["purpose"], 0) + row["wire_bytes_per_rank"]
        assert {purpose: line[world] for purpose, line in traffic.items() if line[world]} == {
            purpose: value for purpose, value in wire.items() if value
        }
        parts = setting["memory_bytes_per_rank"]["parts"]
        assert peaks[world] == setting["memory_bytes_per_rank"]["peak"]["device"]
        assert {kind: line[world] for kind, line in memory.items()} == {
            kind: part["device"] for kind, part in parts.items()
        }
    axis = figures["plan-traffic"].layout.xaxis
    assert (axis.type, list(next(iter(traffic.values())))) == ("log", [2**power for power in range(15)])


def test_the_table_and_the_recommendation_are_those_of_the_command(tmp_path, capsys):
    sets = "zero_optimization.stage=1,2,3"
    fields = {"config": json.dumps(CONFIG), "model": "params:1e8", "world": "64", "links": ""}
    page = draw(tmp_path, **fields, set=sets, memory="1600MB", compute="")
    text = text_of(page)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = [
        "--model",
        "params:1e8",
        "--world",
        "64",
        "--set",
        sets,
        "--device-memory",
        "1600MB",
        "--sequence",
        "2048",
    ]
    assert execute(["plan", str(tmp_path / "ds.json"), *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    begin = shown.index("Use stage=")
    assert shown[begin:] in text
    form = plan_data.form_of(
        Runs(tmp_path), {key: (value,) for key, value in {**fields, "set": sets}.items()}
    )
    frame = plan_data.settings_frame(plan_data.planned(Runs(tmp_path), form))
    settings = printed(tmp_path, capsys, 64, "--set", sets, "--sequence", "2048")
    assert frame["device_bytes"].tolist() == [
        setting["memory_bytes_per_rank"]["peak"]["device"] for setting in settings
    ]


def test_times_are_drawn_with_a_time_of_computation(tmp_path, capsys):
    links = "intra=450GB/s,inter=8x50GB/s"
    page = draw(
        tmp_path,
        config=json.dumps(CONFIG),
        model="params:1e8",
        links=links,
        compute="90ms",
        sequence="",
        set="",
    )
    figure = figures_of(page)["plan-times"]
    drawn = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    (setting,) = printed(tmp_path, capsys, 64, "--links", links, "--step-compute", "90ms")
    assert drawn["communication"][64] == setting["communication_ns"]["all"]
    assert drawn["step, maximum overlap"][64] == setting["step_ns"]["least"]
    assert drawn["step, nothing overlapped"][64] == setting["step_ns"]["most"]


def test_the_form_has_every_option_of_the_command():
    listed = inspect.signature(plan_verb).parameters
    assert set(plan_data.OPTION_OF_FIELD.values()) == set(listed) - {"config", "as_json"}
    assert set(plan_data.OPTION_OF_FIELD) <= set(plan_data.DEFAULTS)
    with_controls = controls.values_by_key(
        page_module.PAGE.render(Runs(Path("missing")), {}, "light").controls
    )
    assert set(plan_data.DEFAULTS) <= set(with_controls)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": "40"}, ["--layers", "40"]),
        ({"backend": "gloo"}, ["--backend", "gloo"]),
        (
            {"experts": "8", "ep_size": "2,4", "expert_k": "2"},
            ["--experts", "8", "--ep-size", "2,4", "--expert-k", "2"],
        ),
        ({"calibration": "calibration.json"}, ["--calibration", "{}/calibration.json"]),
        (
            {"calibration": "calibration.json", "compute": "90ms"},
            ["--calibration", "{}/calibration.json", "--step-compute", "90ms"],
        ),
        (
            {"calibration": "calibration.json", "recorded": "trained", "backend": "gloo"},
            ["--calibration", "{}/calibration.json", "--recorded", "{}/trained", "--backend", "gloo"],
        ),
    ],
    ids=lambda value: " ".join(value),
)
def test_each_option_answers_as_the_command_does(tmp_path, capsys, fields, words):
    runs = tmp_path / "runs"
    shutil.copytree(RECORDED, runs / "trained")
    write_calibration(runs / "calibration.json", made_calibration())
    words = [word.format(runs) for word in words]
    sets = "zero_optimization.stage=0,1,3"
    plain = {"config": json.dumps(CONFIG), "model": "params:1e8", "world": "16", "hosts": "4x4", "links": ""}
    texts = {**plain, "sequence": "128", "set": sets, **fields}
    form = plan_data.form_of(Runs(runs), {key: (value,) for key, value in texts.items()})
    answer = plan_data.planned(Runs(runs), form)
    command = shlex.split(plan_data.command(Runs(runs), form))
    common = ["--hosts", "4x4", "--sequence", "128", "--set", sets]
    listed = ["--model", "params:1e8", "--world", "16", "--device-memory", "80GiB", *common, *words]
    assert dict(pairs_of(command[3:])) == dict(pairs_of(listed))
    settings = printed(tmp_path, capsys, 16, *common, *words)
    assert plan_api.as_json(answer.plan)["settings"] == settings
    assert settings != printed(tmp_path, capsys, 16, *common)


def pairs_of(words):
    """Return pairs of an option and its value."""
    return zip(words[::2], words[1::2], strict=True)


def test_a_calibration_says_whether_messages_are_latency_bound(tmp_path):
    write_calibration(tmp_path / "calibration.json", made_calibration())
    fields = {"config": json.dumps(CONFIG), "model": "params:1e8", "set": ""}
    text = text_of(draw(tmp_path, **fields, calibration="calibration.json"))
    assert "in the calibration (2 ranks, gloo on cpu)" in text and "By NCCL's model" not in text
    assert "By NCCL's model" in text_of(draw(tmp_path, **fields))


def test_a_recorded_run_narrows_the_bounds_or_is_refused(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "trained")
    SyntheticRun(2).write(tmp_path / "bare")
    fields = {"config": json.dumps(CONFIG), "model": "params:1e8", "set": "", "sequence": ""}
    page = draw(tmp_path, **fields, recorded="trained")
    figure = figures_of(page)["plan-times"]
    assert [trace.name for trace in figure.data] == ["communication", "step, at least", "step, at most"]
    assert "The bounds of a step are narrowed by" in text_of(page)
    both = notice_of(draw(tmp_path, **fields, recorded="trained", compute="90ms"))
    assert "give one of them" in both
    damaged = notice_of(draw(tmp_path, **fields, recorded="bare"))
    assert "but the exposed communication of a step is not known" in damaged


def test_the_config_of_a_run_is_planned(tmp_path):
    SyntheticRun(2, config=CONFIG).write(tmp_path / "trained")
    SyntheticRun(2).write(tmp_path / "bare")
    page = draw(tmp_path, run="trained", model="params:1e8", set="")
    text = text_of(page)
    assert f"commprof plan {tmp_path}/trained/config.json --model params:1e8" in text
    # The page uses the configuration of the run, so there is no text to edit.
    assert "Config (JSON" not in text
    assert choices_of(page, "run") == ["trained"]  # The other run has no configuration that could be chosen.
    assert set(choices_of(page, "recorded")) == {"trained", "bare"}
    assert "The run bare has no config.json; choose another run" in notice_of(draw(tmp_path, run="bare"))


def trained(path, world=2, **more):
    run = SyntheticRun(
        world, config=CONFIG | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 4000}}, **more
    )
    run.add_parameters({f"{layer}.weight": 4000 for layer in range(3)})
    for step in range(4):
        run.add_step(step, duration_ns=10_000_000)
        run.add_collective(
            "all_reduce", step=step, payload_bytes=4000, purpose="gradient_reduce", exposed_ns=1_000
        )
    run.write(path)


def test_a_run_fills_the_form_and_is_planned_with_its_own_parameters(tmp_path):
    trained(tmp_path / "a" / "trained")
    drawn = draw(tmp_path, run="a/trained")
    fields = controls.values_by_key(drawn)
    assert {key: fields[key] for key in ("model", "world", "backend", "framework", "recorded", "links")} == {
        "model": "run:a/trained",
        "world": "2",
        "backend": "gloo",
        "framework": "zero_runtime",
        "recorded": "a/trained",
        "links": "",
    }
    text = text_of(drawn)
    assert "This cannot be planned" not in text
    assert "12,000 parameters in 3 tensors; 2 ranks on gloo" in text
    command = f"commprof plan {tmp_path}/a/trained/config.json --model run:{tmp_path}/a/trained --world 2"
    assert command in text and f"--recorded {tmp_path}/a/trained" in text


def test_the_plan_of_a_run_has_the_messages_that_it_recorded(tmp_path, capsys):
    trained(tmp_path / "trained")
    file = tmp_path / "trained" / "config.json"
    assert execute(["plan", str(file), "--model", f"run:{tmp_path}/trained", "--world", "2", "--json"]) == 0
    (setting,) = json.loads(capsys.readouterr().out)["settings"]
    (reduced,) = [row for row in setting["traffic"] if row["purpose"] == "gradient_reduce"]
    assert (reduced["op"], reduced["count"], reduced["payload_bytes"]) == ("all_reduce", 3, 3 * 4000 * 2)


@pytest.mark.parametrize("name", ["../trained", "gone", ""])
def test_only_runs_that_the_dashboard_shows_are_models(tmp_path, name):
    trained(tmp_path / "trained")
    said = notice_of(draw(tmp_path / "trained", config=json.dumps(CONFIG), model=f"run:{name}"))
    assert f"There is no run {name!r}" in said


def test_of_a_run_without_parameters_the_size_of_the_model_is_asked(tmp_path):
    SyntheticRun(2, config=CONFIG).write(tmp_path / "trained")
    assert "expected params:N, such as params:7e9" in notice_of(draw(tmp_path, run="trained"))


def test_the_page_needs_no_run_and_begins_with_an_example(tmp_path):
    for directory in (tmp_path, tmp_path / "missing"):
        assert set(figures_of(draw(directory))) == {"plan-traffic", "plan-memory", "plan-times", "plan-sizes"}


@pytest.mark.parametrize(
    ("field", "text", "parts"),
    [
        ("config", "", ["There is no config", "paste one"]),
        ("config", '{"a": True}', ["The config is not JSON", "True is Python"]),
        ("config", "[1]", ["holds a JSON array"]),
        ("set", "zero_optimization.stage=7", ["stage", "7"]),
        (
            "config",
            '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1e999}}',
            ["reduce_bucket_size"],
        ),
        ("config", '{"zero_optimization": 3}', ["zero_optimization"]),
        (
            "config",
            '{"gradient_accumulation_steps": 10000000}',
            ["messages, and at most 20,000", "commprof plan"],
        ),
        ("config", '{"a": ' + "[" * 100_000, ["nested too deeply"]),
        ("config", '{"a": ' + " " * 300_000 + "1}", ["300,008 characters"]),
        ("model", "", ["expected params:N"]),
        ("model", "py:os:getcwd", ["must not run"]),
        ("model", "hf:/etc", ["must not run"]),
        ("model", "params:1e17", ["1e+13"]),
        ("model", "params:1e999", ["number of parameters"]),
        ("model", "params:-7", ["number of parameters"]),
        ("world", "0", ["from 1 to 65,536"]),
        ("world", "9" * 5000, ["from 1 to 65,536"]),
        ("world", "1e3", ["from 1 to 65,536"]),
        ("world", "12", ["not a multiple of 8"]),
        ("hosts", "3x3", ["has 9 ranks"]),
        ("hosts", "x", ["expected hosts x ranks"]),
        ("links", "fast", ["expected intra=450GB/s"]),
        ("micro_batch", "-1", ["train_micro_batch_size_per_gpu"]),
        ("sequence", "many", ["from 1 to 1,000,000,000"]),
        ("compute", "fast", ["a time with its unit"]),
        ("framework", "megatron", ["expected zero_runtime or deepspeed"]),
        ("backend", "mpi", ["expected nccl or gloo"]),
        ("layers", "0", ["The number of layers", "from 1 to 10,000"]),
        (
            "calibration",
            "../calibration.json",
            ["no calibration '../calibration.json'", "commprof calibrate"],
        ),
        ("recorded", "../run", ["no run '../run'", "choose another"]),
        ("memory", "big", ["a number of bytes was expected"]),
        ("set", "zero_optimization.stag=1,2", ["did you mean zero_optimization.stage"]),
        ("set", "zero_optimization.stage", ["key=value1,value2"]),
        (
            "set",
            "zero_optimization.reduce_bucket_size=" + ",".join(map(str, range(1, 99))),
            ["98 combinations"],
        ),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, caplog, field, text, parts):
    said = notice_of(draw(tmp_path, **{"config": json.dumps(CONFIG), "model": "params:1e8", field: text}))
    assert all(part in said for part in parts), said
    assert "\n" not in said and len(said) < 600 and not caplog.records


def test_hostile_text_stays_text(tmp_path):
    for field in (*plan_data.DEFAULTS, "setting", "run"):
        page = draw(tmp_path, **{field: HOSTILE})
        assert "could not be drawn" not in text_of(page)


def test_one_refused_setting_does_not_hide_the_others(tmp_path):
    text = text_of(draw(tmp_path, config=json.dumps(CONFIG), set="zero_optimization.stage=1,7"))
    assert "stage=7 is refused" in text and "Use stage=1" in text


@pytest.mark.long
def test_a_setting_that_needs_several_ranks_begins_later(tmp_path):
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 8}}
    page = draw(tmp_path, config=json.dumps(config), model="params:1e8", set="")
    traces = figures_of(page)["plan-traffic"].data
    assert min(traces[0].x) == 8
    assert "No values at 1, 2, 4 ranks" in text_of(page)


def test_the_batch_grows_with_the_ranks_where_all_three_batch_sizes_are_set(tmp_path, capsys):
    sizes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    fields = {"model": "params:1e8", "world": "16", "set": ""}
    page = draw(tmp_path, config=json.dumps({**CONFIG, **sizes, "train_batch_size": 64}), **fields)
    drawn = {
        trace.name: dict(zip(trace.x, trace.y, strict=True))
        for trace in figures_of(page)["plan-traffic"].data
    }
    assert list(drawn["gradient_reduce"]) == [1 << power for power in range(15)]
    for world in (2, 64):
        (setting,) = printed(tmp_path, capsys, world, config={**CONFIG, **sizes})
        (row,) = [row for row in setting["traffic"] if row["purpose"] == "gradient_reduce"]
        assert drawn["gradient_reduce"][world] == row["wire_bytes_per_rank"]
    assert "train_batch_size grows with the ranks" in text_of(page) and "Not at" not in text_of(page)

    page = text_of(draw(tmp_path, config=json.dumps({**CONFIG, **sizes, "train_batch_size": 32}), **fields))
    assert "train_batch_size 32 != micro-batch 4" in page and "This cannot be planned" in page


def test_the_messages_of_deepspeed_are_those_of_the_command(tmp_path, capsys):
    reduction = {"zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"}}
    config = CONFIG | reduction
    page = draw(tmp_path, config=json.dumps(config), model="params:1e8", framework="deepspeed", set="")
    drawn = {
        trace.name: dict(zip(trace.x, trace.y, strict=True))
        for trace in figures_of(page)["plan-traffic"].data
    }
    (setting,) = printed(tmp_path, capsys, 64, "--framework", "deepspeed", config=config)
    (row,) = [row for row in setting["traffic"] if row["purpose"] == "gradient_reduce"]
    assert row["op"] == "all_reduce" and drawn["gradient_reduce"][64] == row["wire_bytes_per_rank"]
    assert "messages are those of DeepSpeed" in text_of(page) and "--framework deepspeed" in text_of(page)


def test_the_address_chooses_the_setting_of_the_figures(tmp_path):
    fields = {"config": json.dumps(CONFIG), "set": "zero_optimization.stage=1,3"}
    chosen = text_of(draw(tmp_path, **fields, setting="stage=3"))
    assert "stage=3: wire bytes that a rank sends" in chosen
    assert "stage=1: wire bytes that a rank sends" in text_of(draw(tmp_path, **fields, setting="stage=1"))
