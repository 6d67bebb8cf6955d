"""Provides the data of the page Plan: a form from the address, its plan, and the frames of the cards.

This module draws nothing. The page can plan only models for which only the size is known, and the models of the
runs that the dashboard shows. Other sources are not allowed, because ``py:`` runs code and ``hf:`` reads a
directory, and a visitor of the page could choose either.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof.errors import CommprofError, UsageError
from commprof.plan import api as plan_api
from commprof_dash import address
from commprof_dash.address import Query
from commprof_dash.data import Runs
from commprof_dash.pages.bandwidth.data import calibration_of

WORLDS: Final = tuple(1 << power for power in range(15))
MOST_WORLD: Final = 1 << 16
MOST_SETTINGS: Final = 16
# The largest number of messages of a step. With this number, one setting takes a few seconds.
MOST_MESSAGES: Final = 20_000
MOST_PARAMETERS: Final = 10**13
MOST_LAYERS: Final = 10_000
_MOST_CONFIG_BYTES: Final = 200_000
_MICRO_BATCH: Final = "train_micro_batch_size_per_gpu"
_SIZED: Final = "params:"
_RECORDED: Final = "run:"
_CONFIG_FILE: Final = "config.json"

EXAMPLE_CONFIG: Final = """{
  "train_micro_batch_size_per_gpu": 1,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "reduce_bucket_size": 5e8
  }
}"""
# The values of the form if the address has none: an example that can be changed.
DEFAULTS: Final = {
    "config": EXAMPLE_CONFIG,
    "model": "params:7e9",
    "world": "64",
    "hosts": "",
    "micro_batch": "",
    "links": "intra=450GB/s,inter=8x50GB/s",
    "layers": "",
    "sequence": "2048",
    "experts": "",
    "ep_size": "",
    "expert_k": "",
    "capacity_factor": "",
    "min_capacity": "",
    "drop_tokens": "",
    "expert_layers": "",
    "expert_skew": "",
    "calibration": "",
    "compute": "",
    "recorded": "",
    "memory": "80GiB",
    "set": "zero_optimization.stage=1,2,3",
    "framework": "zero_runtime",
    "backend": "nccl",
}
# The option of `commprof plan` for each field. "config" is the argument of the command, and a micro-batch is
# an additional setting.
OPTION_OF_FIELD: Final = {
    "model": "model",
    "world": "world",
    "hosts": "hosts",
    "links": "links",
    "layers": "layers",
    "sequence": "sequence",
    "experts": "experts",
    "ep_size": "ep_size",
    "expert_k": "expert_k",
    "capacity_factor": "capacity_factor",
    "min_capacity": "min_capacity",
    "drop_tokens": "drop_tokens",
    "expert_layers": "expert_layers",
    "expert_skew": "expert_skew",
    "calibration": "calibration",
    "compute": "step_compute",
    "recorded": "recorded",
    "framework": "framework",
    "backend": "backend",
    "memory": "device_memory",
    "set": "settings",
}
# The defaults that a command does not need to name.
_CLI_DEFAULTS: Final = {"framework": "zero_runtime", "backend": "nccl"}

# The frameworks whose rules determine the traffic.
FRAMEWORKS: Final = {"zero_runtime": "zero_runtime", "deepspeed": "DeepSpeed"}
BACKENDS: Final = {"nccl": "NCCL", "gloo": "gloo"}


class Form(NamedTuple):
    """The contents of the fields of the page.

    Attributes:
        run: The run whose config is planned; empty for ``config``.
        texts: The texts of the other fields, by their key in the address.
        setting: The label of the setting that the figures show; empty for the recommended setting.
    """

    run: str
    texts: dict[str, str]
    setting: str


class File(NamedTuple):
    """A file with its current modification time and size."""

    path: Path
    modified_ns: int
    num_bytes: int


class Asked(NamedTuple):
    """The attributes of a :class:`commprof.plan.api.Question` that the form sets, in a hashable form.

    ``model_state`` changes with the files of a run whose model is planned.
    """

    config: str
    model: str
    world: int
    hosts: str | None
    links: str | None
    settings: tuple[str, ...]
    layers: int | None
    backend: str
    sequence: int | None
    step_compute: str | None
    capacity: int | None
    calibration: File | None
    framework: str
    recorded: plan_api.RecordedStep | None
    experts: tuple[tuple[str, str], ...] = ()
    model_state: str = ""


class Planned(NamedTuple):
    """The answer to a form.

    Attributes:
        plan: The plan of all settings.
        rows: The settings that are not refused.
        chosen: The position of the recommended setting; None if there is none.
        sentence: The sentence with the reason.
    """

    plan: plan_api.Plan
    rows: list[plan_api.Row]
    chosen: int | None
    sentence: str


def help_of(field: str) -> str:
    """Return the help of the field's option, as on the command line; empty for a field without an option."""
    option = OPTION_OF_FIELD.get(field)
    return plan_api.OPTIONS[option].help if option else ""


def form_of(runs: Runs, query: Query) -> Form:
    """Return the form that the address describes.

    Fields that the address does not name have the values of its run, or of an example.
    """
    run = "".join(address.runs_in(query)[:1])
    defaults = DEFAULTS | _of_run(runs, run)
    texts = {}
    for key, default in defaults.items():
        values = query.get(key)
        texts[key] = default if values is None else "".join(values[:1])
    return Form(run, texts, "".join(query.get("setting", ())[:1]))


def _of_run(runs: Runs, name: str) -> dict[str, str]:
    """Return the fields for the run ``name``: its model and ranks, its environment, and the times that it measured."""
    if name not in runs.select([name]).readable:
        return {}
    try:
        job: plan_api.RecordedJob = runs.of_run("recorded job", name, plan_api.read_job)
    except CommprofError:
        return {}
    calibration = calibration_of(runs, name, job.host_names)
    return {
        "model": f"{_RECORDED}{name}" if job.has_model else "",
        "world": job.world,
        "hosts": job.hosts,
        "links": "",
        "sequence": "",
        "memory": "",
        "calibration": "" if calibration is None else calibration.relative_to(runs.directory).as_posix(),
        "recorded": name if job.has_times else "",
        "framework": job.framework,
        "backend": job.backend or DEFAULTS["backend"],
    }


def config_text(runs: Runs, form: Form) -> str:
    """Return the text of the config: the config of the run, or the text of the field.

    Raises:
        UsageError: The run has no config.
    """
    if not form.run:
        return form.texts["config"]

    def read(path: Path) -> str | None:
        file = path / _CONFIG_FILE
        if not file.is_file() or file.stat().st_size > _MOST_CONFIG_BYTES:
            return None
        return file.read_text("utf-8", "replace")

    text = runs.of_run("config", form.run, read)
    if text is None:
        raise UsageError(f"the run {form.run} has no {_CONFIG_FILE}; choose another run, or paste a config")
    return str(text)


def command(runs: Runs, form: Form) -> str:
    """Return the command that computes the same answer."""
    file = runs.directory / form.run / _CONFIG_FILE if form.run else Path("ds.json")
    words = []
    for field, option in OPTION_OF_FIELD.items():
        text = form.texts[field].strip()
        if field == "set" or not text or text == _CLI_DEFAULTS.get(field):
            continue
        if field in ("calibration", "recorded"):
            text = str(runs.directory / text)
        elif field == "model" and text.startswith(_RECORDED):
            text = f"{_RECORDED}{runs.directory / text.removeprefix(_RECORDED)}"
        words += [plan_api.OPTIONS[option].flag, text]
    words += [word for text in _settings(form) for word in (plan_api.OPTIONS["settings"].flag, text)]
    return shlex.join(["commprof", "plan", str(file), *words])


def planned(runs: Runs, form: Form) -> Planned:
    """Return the plan of ``form``.

    Raises:
        CommprofError: A field has an invalid value. The message is one line that states what was expected.
    """
    texts = {key: text.strip() for key, text in form.texts.items()}
    text = config_text(runs, form)
    if not text.strip():
        raise UsageError("there is no config; paste one as DeepSpeed reads it, or choose a run")
    if len(text) > _MOST_CONFIG_BYTES:
        raise UsageError(f"the config has {len(text):,} characters; expected at most {_MOST_CONFIG_BYTES:,}")
    config = plan_api.parse_config(text, "the config")
    world = _number(texts["world"] or "1", "the number of ranks", MOST_WORLD)
    model, model_state = _model(runs, texts["model"])
    return _planned(
        Asked(
            json.dumps(config),
            model,
            world,
            texts["hosts"] or None,
            texts["links"] or None,
            _settings(form),
            _number(texts["layers"], "the number of layers", MOST_LAYERS) if texts["layers"] else None,
            texts["backend"] or DEFAULTS["backend"],
            _number(texts["sequence"], "the sequence length", 10**9) if texts["sequence"] else None,
            texts["compute"] or None,
            plan_api.parse_capacity(texts["memory"]) if texts["memory"] else None,
            _calibration(runs, texts["calibration"]) if texts["calibration"] else None,
            texts["framework"] or DEFAULTS["framework"],
            _recorded(runs, texts["recorded"]) if texts["recorded"] else None,
            tuple((name, texts[field]) for name, field in plan_api.EXPERT_OPTIONS.items() if texts[field]),
            model_state,
        )
    )


def calibrations(runs: Runs) -> list[str]:
    """Return the names of the readable calibrations beside the runs, the newest first."""
    listed = api.calibrations(runs.directory)
    return [str(name) for name in listed["name"][listed["note"].isna()]]


def _calibration(runs: Runs, name: str) -> File:
    if name not in calibrations(runs):
        raise UsageError(
            f"there is no calibration {name[:80]!r} below {runs.directory} that can be read; choose another, or make one: "
            "commprof calibrate --out calibration.json"
        )
    path = runs.directory / name
    stat = path.stat()
    return File(path, stat.st_mtime_ns, stat.st_size)


def _recorded(runs: Runs, name: str) -> plan_api.RecordedStep:
    if name not in runs.select([name]).readable:
        raise UsageError(
            f"there is no run {name[:80]!r} below {runs.directory} that can be read; choose another"
        )
    recorded: plan_api.RecordedStep = runs.of_run("recorded step", name, plan_api.read_recorded)
    return recorded


def _settings(form: Form) -> tuple[str, ...]:
    listed = [line.strip().removeprefix("--set").strip() for line in form.texts["set"].splitlines()]
    micro_batch = form.texts["micro_batch"].strip()
    return (*filter(None, listed), *([f"{_MICRO_BATCH}={micro_batch}"] if micro_batch else []))


def _number(text: str, what: str, most: int) -> int:
    plain = text.replace(",", "").replace("_", "")
    if not plain.isascii() or not plain.isdecimal() or len(plain) > 20 or not 1 <= int(plain) <= most:
        raise UsageError(f"{what} is {text[:80]!r}; expected a whole number from 1 to {most:,}")
    return int(plain)


def _model(runs: Runs, text: str) -> tuple[str, str]:
    """Return the model in the form of ``commprof plan``, and a text that changes with the files of the model."""
    name = text.removeprefix(_RECORDED)
    if name != text:
        if name not in runs.select([name]).readable:
            raise UsageError(
                f"there is no run {name[:80]!r} below {runs.directory} that can be read; name another model, such as "
                "params:7e9"
            )
        path, state = runs.of_run("model", name, lambda path: (path, api.fingerprint(path).key))
        return f"{_RECORDED}{path}", str(state)
    if not text.startswith(_SIZED):
        raise UsageError(
            f"the model is {text[:80]!r}; expected params:N, such as params:7e9, or run:NAME. To plan a model "
            "that a function builds, run commprof plan: a page must not run code that its address names"
        )
    numel = plan_api.parse_number(text.removeprefix(_SIZED), "the model")
    if numel > MOST_PARAMETERS:
        raise UsageError(f"the model has {numel:.3g} parameters; expected at most {MOST_PARAMETERS:.0e}")
    return text, ""


@lru_cache(maxsize=16)  # redrawing with another scheme or setting in the figures requests the same answer
def _planned(asked: Asked) -> Planned:
    combinations = plan_api.combinations(asked.settings) * prod(
        len(text.split(",")) for _, text in asked.experts
    )
    if combinations > MOST_SETTINGS:
        raise UsageError(
            f"there are {combinations:,} combinations of settings; expected at most {MOST_SETTINGS} on this page"
        )
    file = asked.calibration
    question = plan_api.Question(
        **{key: value for key, value in asked._asdict().items() if key != "model_state"}
        | {
            "config": json.loads(asked.config),
            "experts": dict(asked.experts),
            "calibration": None if file is None else plan_api.read_calibration(file.path),
        },
        most_messages=MOST_MESSAGES,
    )
    try:
        plan = plan_api.make_plan(question)
        rows = plan_api.compare(plan)
        return Planned(plan, rows, *plan_api.recommendation(plan, rows))
    except (OverflowError, ValueError) as problem:
        raise UsageError(f"a number of the config cannot be used: {problem}; correct it") from None


def shown_row(answer: Planned, label: str) -> plan_api.Row:
    """Return the setting that the figures show.

    It is the setting with this label, or else the recommended one, or else the first.
    """
    by_label = {row.label: row for row in answer.rows}
    return by_label.get(label) or answer.rows[answer.chosen or 0]


def settings_frame(answer: Planned) -> pd.DataFrame:
    """Return a row for each setting: its traffic, memory and time, or the reason if it is refused."""
    listed = []
    for number, row in enumerate(answer.rows):
        sent = not row.prediction.note
        timed = None if isinstance(row.timed, str) else row.timed
        listed.append(
            {
                "setting": row.label,
                "recommended": number == answer.chosen,
                "rank_bytes": row.totals.rank_bytes if sent else None,
                "host_bytes": row.totals.host_bytes if sent else None,
                "device_bytes": row.prediction.on_device,
                "peak_phase": row.prediction.peak and row.prediction.peak.phase,
                "host_memory_bytes": sum(part.host for part in row.prediction.parts),
                "messages": row.totals.messages if sent else None,
                "median_message_bytes": row.totals.median_bytes,
                "communication_ns": timed and timed.communication_ns,
                "step_least_ns": timed and timed.least_ns,
                "step_most_ns": timed and timed.most_ns,
                "refused": None,
            }
        )
    listed += [{"setting": name, "recommended": False, "refused": why} for name, why in answer.plan.refused]
    return pd.DataFrame(listed)


class Curves(NamedTuple):
    """One setting over the number of ranks.

    Attributes:
        traffic: The columns ``world``, ``purpose``, ``wire_bytes`` per rank and step.
        memory: The columns ``world``, ``kind``, ``device_bytes``, ``host_bytes``, ``disk_bytes`` of a rank, and
            ``peak_bytes``, the largest number of bytes on its device at any time, with its ``peak_phase``. The
            last two are equal for all kinds, or null.
        times: The columns ``world``, ``communication_ns``, ``step_least_ns``, ``step_most_ns``; empty if not
            known.
        gaps: The reasons why numbers of ranks are missing.
        batch_follows_ranks: Whether ``train_batch_size`` grows with the ranks instead of being that of the
            config.
    """

    traffic: pd.DataFrame
    memory: pd.DataFrame
    times: pd.DataFrame
    gaps: dict[int, str]
    batch_follows_ranks: bool


def curves(answer: Planned, row: plan_api.Row) -> Curves:
    """Return the curves of ``row`` over the numbers of ranks :data:`WORLDS`."""
    outcomes = plan_api.over_worlds(answer.plan, row.prediction.config, WORLDS)
    gaps = {each.world: each.reason for each in outcomes if each.reason}
    sent = [each for each in outcomes if not each.reason]
    purposes = dict.fromkeys(purpose for each in sent for purpose in each.wire_bytes)
    kinds = dict.fromkeys(part.what for each in outcomes for part in each.memory)
    traffic = [
        {"world": each.world, "purpose": purpose, "wire_bytes": each.wire_bytes.get(purpose, 0)}
        for each in sent
        for purpose in purposes
    ]
    memory = [
        {"world": each.world, "kind": kind, **_held(each, kind), **_peak(each)}
        for each in outcomes
        if each.memory
        for kind in kinds
    ]
    times = [
        {
            "world": each.world,
            "communication_ns": each.timed.communication_ns,
            "step_least_ns": each.timed.least_ns,
            "step_most_ns": each.timed.most_ns,
        }
        for each in sent
        if not isinstance(each.timed, str)
    ]
    places = [f"{place}_bytes" for place in plan_api.PLACES]
    return Curves(
        pd.DataFrame(traffic, columns=["world", "purpose", "wire_bytes"]),
        pd.DataFrame(memory, columns=["world", "kind", *places, "peak_bytes", "peak_phase"]),
        pd.DataFrame(times, columns=["world", "communication_ns", "step_least_ns", "step_most_ns"]),
        gaps,
        plan_api.batch_follows_ranks(row.prediction.config),
    )


def _held(outcome: plan_api.WorldOutcome, kind: str) -> dict[str, int]:
    parts = [part for part in outcome.memory if part.what == kind]
    return {f"{place}_bytes": sum(getattr(part, place) for part in parts) for place in plan_api.PLACES}


def _peak(outcome: plan_api.WorldOutcome) -> dict[str, int | str | None]:
    peak = outcome.peak
    return {"peak_bytes": peak and peak.device, "peak_phase": peak and peak.phase}


class Messages(NamedTuple):
    """The messages of a step of one setting.

    Attributes:
        sent: The messages by purpose and operation, with the columns ``purpose``, ``op``, ``groups``,
            ``group_size``, ``messages``, ``payload_bytes``, ``padding_bytes`` (null: not known),
            ``wire_bytes_per_rank``, ``between_hosts_bytes``, ``exact``.
        sizes: The messages by size, with the columns ``from_bytes``, ``to_bytes``, ``messages``.
    """

    sent: pd.DataFrame
    sizes: pd.DataFrame


def messages(answer: Planned, row: plan_api.Row) -> Messages:
    """Return the messages of a step of ``row``."""
    traffic = plan_api.traffic(answer.plan, row)
    sent = [
        {
            "purpose": each.purpose,
            "op": each.op,
            "groups": each.groups,
            "group_size": each.group_size,
            "messages": each.count,
            "payload_bytes": each.payload_bytes,
            "padding_bytes": each.padding_bytes,
            "wire_bytes_per_rank": each.wire_bytes_per_rank,
            "between_hosts_bytes": each.between_hosts,
            "exact": each.exact,
        }
        for each in traffic
    ]
    sizes = [(low, 2 * low or 1, number) for low, number in plan_api.histogram(traffic).items()]
    columns = ["from_bytes", "to_bytes", "messages"]
    return Messages(pd.DataFrame(sent), pd.DataFrame(sizes, columns=columns))


def runs_with_configs(runs: Runs) -> Sequence[str]:
    """Return the names of the runs whose config can be chosen, the newest first."""
    listing: Any = runs.listing()
    return [
        str(name)
        for name, path in zip(listing["name"], listing["path"], strict=True)
        if (Path(path) / _CONFIG_FILE).is_file()
    ]
