"""Test ``commprof plan`` and its deprecated alias from the user's point of view."""

from __future__ import annotations

import json

import pytest

from commprof.cli import execute

BASE = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
LINKS = "intra=450GB/s,inter=8x50GB/s"


@pytest.fixture
def plan(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(BASE))

    def run(*words, code=0, verb="plan"):
        assert execute([verb, str(path), *words]) == code
        return capsys.readouterr()

    return run


def test_the_json_of_two_settings(plan):
    words = (
        "--model",
        "params:1e6",
        "--layers",
        "2",
        "--world",
        "16",
        "--set",
        "zero_optimization.stage=0,3",
    )
    found = json.loads(plan(*words, "--json").out)
    assert list(found) == ["settings"]
    for setting, stage in zip(found["settings"], (0, 3), strict=True):
        assert list(setting)[:4] == ["set", "traffic", "memory_bytes_per_rank", "step_ns"]
        assert setting["set"] == {"zero_optimization.stage": stage}
        assert setting["step_ns"] == {"least": None, "most": None}
        memory = setting["memory_bytes_per_rank"]
        assert list(memory) == ["device", "host", "disk", "parts", "peak"] and memory["peak"] is None
        for place in ("device", "host", "disk"):
            assert memory[place] == sum(part[place] for part in memory["parts"].values())
    (reduced,) = found["settings"][0]["traffic"]
    assert reduced == {
        "purpose": "gradient_reduce",
        "op": "all_reduce",
        "group_size": 16,
        "count": 1,
        "payload_bytes": 2_000_000,
        "wire_bytes_per_rank": 3_750_000,
        "padding_bytes": 0,
    }
    same = {"least": 2_000_000, "mean": 2_000_000, "most": 2_000_000}
    assert found["settings"][0]["per_rank"]["payload_bytes"] == same
    assert found["settings"][0]["rank_classes"] == [
        {"first_rank": 0, "ranks": 16, "messages": 1, "payload_bytes": 2_000_000, "wire_bytes": 3_750_000}
    ]


def test_the_tables_of_one_setting(plan):
    shown = plan("--model", "params:1e9", "--world", "1024", "--hosts", "128x8", "--links", LINKS).out
    text = " ".join(shown.split())
    assert "1,024 ranks on nccl, 128 hosts of 8 ranks; rings connect ranks in rank order" in text
    assert "of it to other hosts" in text and "payload of a message" in text
    assert "The links between hosts saturate first." in text
    assert "stay inside its host" in " ".join(plan("--model", "params:1e9", "--world", "8").out.split())


def test_stage_3_says_how_many_all_gathers_a_step_launches(plan):
    words = ("--model", "params:1e9", "--layers", "4", "--world", "8", "--set", "zero_optimization.stage=3")
    text = " ".join(plan(*words).out.split())
    (setting,) = json.loads(plan(*words, "--json").out)["settings"]
    (gathered,) = [row["count"] for row in setting["traffic"] if row["purpose"] == "parameter_gather"]
    assert f"Stage 3 launches {gathered} all-gathers per step because each module is a unit" in text


def test_settings_are_compared_and_one_is_recommended(plan):
    words = ("--model", "params:7e9", "--world", "64", "--set", "zero_optimization.stage=1,2,3")
    text = " ".join(plan(*words, "--device-memory", "10GiB").out.split())
    assert "Use stage=3: it is the only setting that fits." in text
    assert "of the 3 settings, 1 fits in 10.0 GiB" in text
    assert "No setting fits in 1.00 GiB" in plan(*words, "--device-memory", "1GiB").out
    per_sample = " ".join(
        plan(*words, "--set", "train_micro_batch_size_per_gpu=1,4", "--device-memory", "80GiB").out.split()
    )
    assert "Use stage=3 train_micro_batch_size_per_gpu=4: its hosts send the fewest bytes" in per_sample
    assert "to other hosts for each sample." in per_sample


def test_a_refused_setting_does_not_stop_the_others(plan):
    words = ("--model", "params:7e9", "--world", "64", "--set", "zero_optimization.stage=1,5")
    shown = " ".join(plan(*words).out.split())
    assert "stage=5 refused - - - - -" in shown
    assert "stage=5 is refused: zero_optimization.stage is 5; expected 0, 1, 2 or 3" in shown
    assert "Use stage=1: it is the only setting." in shown
    usable, refused = json.loads(plan(*words, "--json").out)["settings"]
    assert usable["traffic"] and "refused" not in usable
    assert refused == {
        "set": {"zero_optimization.stage": 5},
        "traffic": [],
        "memory_bytes_per_rank": None,
        "step_ns": {"least": None, "most": None},
        "refused": "zero_optimization.stage is 5; expected 0, 1, 2 or 3",
    }
    none = ("--model", "params:7e9", "--world", "64", "--set", "zero_optimization.stage=5,6")
    assert "stage is 5" in plan(*none, code=2).err


def test_the_time_of_a_step_decides_where_it_is_known(plan):
    """Stage 3 sends the fewest bytes, but in so many messages that NCCL's latencies make it the slowest."""
    words = ("--model", "params:7e9", "--world", "1024", "--set", "zero_optimization.stage=1,3")
    text = " ".join(plan(*words, "--links", LINKS, "--step-compute", "900ms").out.split())
    assert "Use stage=1: its step takes the least time." in text
    assert "Use stage=3: its hosts send the fewest bytes" in " ".join(plan(*words).out.split())
    batches = ("--set", "train_micro_batch_size_per_gpu=1,4")
    shown = plan(*words[:4], *batches, "--links", LINKS, "--step-compute", "900ms")
    assert "(--step-compute, --recorded) is not used: steps have different numbers of samples" in shown.err
    assert (
        "Use train_micro_batch_size_per_gpu=4: its messages take the least time for each sample."
        in " ".join(shown.out.split())
    )


def test_deepspeed_ignores_the_keys_of_zero_runtime(plan):
    keys = ("gradient_reduction=reduce_scatter", "stage=2", "overlap_parameter_gather=true")
    words = ("--model", "params:1e8", "--world", "8", "--links", LINKS, "--step-compute", "1s")
    for key in keys:
        words += ("--set", f"zero_optimization.{key}")
    found = {}
    for framework in ("zero_runtime", "deepspeed"):
        (found[framework],) = json.loads(plan(*words, "--framework", framework, "--json").out)["settings"]
    ops = {
        name: {row["op"] for row in each["traffic"] if row["purpose"] == "gradient_reduce"}
        for name, each in found.items()
    }
    assert ops == {"zero_runtime": {"reduce_scatter"}, "deepspeed": {"all_reduce"}}
    assert found["deepspeed"]["communication_ns"]["overlapping"] == 0
    assert found["zero_runtime"]["communication_ns"]["overlapping"] > 0
    assert "messages are those of DeepSpeed 0.19" in " ".join(
        plan(*words, "--framework", "deepspeed").out.split()
    )
    assert "expected zero_runtime or deepspeed" in plan(*words, "--framework", "megatron", code=2).err
    shown = plan(*words[:4], "--framework", "deepspeed", "--set", "tp_size=2", "--json")
    assert "how DeepSpeed sends along the axes" in shown.err
    assert json.loads(shown.out)["settings"][0]["traffic"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "7e9"), "--model is '7e9'"),
        (("--model", "params:7e9", "--world", "16", "--hosts", "3x8"), "--hosts 3x8 has 24 ranks"),
        (("--model", "params:7e9", "--links", "fast"), "--links is 'fast'"),
        (
            ("--model", "params:7e9", "--set", "zero_optimization.stag=1"),
            "did you mean zero_optimization.stage",
        ),
        (("--model", "params:7e9", "--set", "zero_optimization.stage=5"), "stage is 5"),
        (("--model", "params:7e9", "--set", "stage"), "key=value1,value2 was expected"),
        (("--model", "params:7e9", "--world", "100000000"), "Invalid value for '--world'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(plan, words, message):
    shown = plan(*words, code=2)
    assert message in shown.err and len(shown.err.splitlines()) == 1 and not shown.out


def test_requested_is_an_alias_that_says_so(plan):
    shown = plan("--params", "1e9", "--json", verb="requested")
    assert (
        shown.err == "commprof: commprof requested is deprecated; use commprof plan CONFIG --model params:N\n"
    )
    found = json.loads(shown.out)
    planned = json.loads(plan("--model", "params:1e9", "--json").out)["settings"][0]
    assert (
        sum(each["device"] for each in found["memory_per_rank"]) == planned["memory_bytes_per_rank"]["device"]
    )
    assert [row["payload_bytes"] for row in found["messages_per_step"]] == [
        row["payload_bytes"] for row in planned["traffic"]
    ]


def test_a_built_model_is_not_divided_among_stages(plan, tmp_path, monkeypatch):
    (tmp_path / "planned_linear.py").write_text(
        "from torch import nn\n\ndef model(): return nn.Linear(8, 8)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--model", "py:planned_linear:model", "--world", "8", "--set", "tp_size=2")
    assert "use --model params:N" in plan(*words, code=2).err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_batch_size": 100}, "batch sizes do not multiply: train_batch_size 100 != micro-batch 2 x"),
        (
            {
                "train_batch_size": 96,
                "train_micro_batch_size_per_gpu": None,
                "gradient_accumulation_steps": 5,
            },
            "train_batch_size 96 is not a multiple of gradient accumulation steps 5 x 16 data-parallel ranks, so no micro-",
        ),
        (
            {
                "train_batch_size": 20,
                "train_micro_batch_size_per_gpu": None,
                "gradient_accumulation_steps": None,
            },
            "train_batch_size 20 is not a multiple of 16 data-parallel ranks, so no micro-batch fits",
        ),
        ({"fp16": {"enabled": True}}, "both fp16 and bf16 are enabled"),
        ({"optimizer": "Adam"}, "optimizer is 'Adam' in the config; expected an object with type and params"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device is 'nvme' without nvme_path",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            "set zero_optimization.offload_param.nvme_path to a folder",
        ),
    ],
)
def test_a_config_that_no_engine_starts_with_is_refused(tmp_path, capsys, changes, message):
    path = tmp_path / "ds.json"
    batches = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    path.write_text(json.dumps({**BASE, **batches, **changes}))
    assert execute(["plan", str(path), "--model", "params:1e6", "--world", "16"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"prescale_gradients": True},
            "prescale_gradients is True, and DeepSpeed does not start with it at stage 2",
        ),
        (
            {"gradient_predivide_factor": 2.0},
            "gradient_predivide_factor is 2.0, and DeepSpeed does not start",
        ),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": 5}}, "with an odd number; set 6"),
    ],
)
def test_what_deepspeed_asserts_not_to_have_is_refused(tmp_path, capsys, keys, message):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, **keys}))
    words = ["plan", str(path), "--model", "params:1e6", "--world", "2"]
    assert execute([*words, "--framework", "deepspeed"]) == 2
    assert message in capsys.readouterr().err
    assert execute(words) == 0
    off = [
        "--set",
        "zero_optimization.reduce_scatter=false",
        "--set",
        "zero_optimization.allgather_bucket_size=6",
    ]
    assert execute([*words, "--framework", "deepspeed", *off]) == 0


def test_a_key_that_occurs_twice_is_refused(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    assert execute(["plan", str(path), "--model", "params:1e6"]) == 2
    assert "the key 'stage' occurs twice in one object" in capsys.readouterr().err


def test_open_and_misspelled_keys_are_named(tmp_path, capsys):
    path = tmp_path / "ds.json"
    zero = {"stage": 3, "overlap_com": True, "reduce_bucket_size": "auto", "gradient_reduction": "auto"}
    optimizer = {"type": "AdamW", "params": {"lr": "auto"}}
    config = {"bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto", "optimizer": optimizer}
    path.write_text(json.dumps({**config, "zero_optimization": zero}))
    words = ["plan", str(path), "--model", "params:1e6", "--world", "2"]
    assert execute(words) == 0
    found = capsys.readouterr()
    text = " ".join(found.out.split())
    assert "auto in the config: bf16.enabled, gradient_accumulation_steps. Launchers" in text
    assert "zero_optimization.reduce_bucket_size is auto: the start of the run" in text
    assert "zero_optimization.overlap_com in the config is not used" in found.err
    assert "Did you mean overlap_comm?" in found.err
    assert execute([*words, "--framework", "deepspeed", "--json"]) == 0
    expected = "gradient_accumulation_steps, zero_optimization.reduce_bucket_size. Launchers"
    assert expected in capsys.readouterr().err


def test_bytes_of_ranks_are_integers(plan):
    stages = ["--set", "pipeline.stages=3", "--set", "gradient_accumulation_steps=7"]
    words = ["--model", "params:1e6", "--layers", "6", "--world", "6", "--hosts", "1x6", "--sequence", "31"]
    (setting,) = json.loads(plan(*words, *stages, "--json").out)["settings"]
    spread = setting["per_rank"]["wire_bytes"]
    assert spread["least"] < spread["mean"] < spread["most"]
    assert all(
        type(value) is int
        for name in ("payload_bytes", "wire_bytes")
        for value in setting["per_rank"][name].values()
    )


def test_secondary_shards_are_in_the_memory(plan):
    stage = ["--set", "zero_optimization.stage=3", "--set", "zero_optimization.zero_hpz_partition_size=1,4"]
    words = ["--model", "params:1.2e6", "--layers", "1", "--world", "16", *stage, "--json"]
    without, found = json.loads(plan(*words).out)["settings"]
    parts = found["memory_bytes_per_rank"]["parts"]
    assert parts.pop("secondary shards") == {"device": 1_200_000 * 2 // 4, "host": 0, "disk": 0}
    assert parts == without["memory_bytes_per_rank"]["parts"]


def test_without_a_rate_nothing_is_said_about_such_numbers_of_ranks(plan):
    words = ["--model", "params:1e9", "--world", "16", "--links", "inter=50GB/s"]
    text = " ".join(plan(*words).out.split())
    assert "bandwidth bound up to 0 ranks" not in text and "of it latency: bandwidth bound" in text


def test_offload_to_files_with_a_folder_is_planned(plan):
    words = ("--model", "params:1e6", "--set", "zero_optimization.offload_optimizer.device=none,nvme")
    words += ("--set", "zero_optimization.offload_optimizer.nvme_path=/nvme", "--json")
    without, files = json.loads(plan(*words).out)["settings"]
    assert "refused" not in files
    assert files["memory_bytes_per_rank"]["disk"] > without["memory_bytes_per_rank"]["disk"] == 0


def test_a_whole_number_with_an_exponent_is_an_integer(plan):
    words = ("--model", "params:1e6", "--set", "zero_optimization.reduce_bucket_size=1e5,5E8")
    found = [
        each["set"]["zero_optimization.reduce_bucket_size"]
        for each in json.loads(plan(*words, "--json").out)["settings"]
    ]
    assert found == [100_000, 500_000_000]
    assert all(isinstance(each, int) for each in found)
    text = plan(*words).out
    assert "reduce_bucket_size=100000 " in text and "100000.0" not in text
