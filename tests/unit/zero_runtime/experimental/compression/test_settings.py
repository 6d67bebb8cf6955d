"""Test the keys of gradient compression: their meaning, and which are refused before the training starts."""

from __future__ import annotations

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError


def read(stage=2, zero=None, **top):
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **(zero or {})},
        **top,
    }
    return RuntimeConfig.from_mapping(given, 2)


def compression(**keys):
    return read(gradient_compression=keys).gradient_compression


def test_nothing_is_compressed_unless_asked_for():
    assert read().gradient_compression is None
    assert read(gradient_compression=None).gradient_compression is None
    assert compression(algorithm="none") is None
    assert compression(enabled=False, algorithm="topk") is None
    assert read(gradient_compression={"algorithm": "none"}, stage=3).gradient_compression is None


def test_compress_communication_means_the_default_settings():
    asked = read(compress_communication=True).gradient_compression
    assert asked == compression()
    assert (asked.algorithm, asked.topk_ratio, asked.error_feedback, asked.warmup_steps) == (
        "topk",
        0.01,
        True,
        0,
    )
    both = read(compress_communication=True, gradient_compression={"algorithm": "1bit"})
    assert both.gradient_compression.algorithm == "1bit"


def test_settings_are_those_given():
    asked = compression(algorithm="2bit", error_feedback=False, warmup_steps=5, huffman_coding=True)
    assert (asked.algorithm, asked.error_feedback, asked.warmup_steps, asked.huffman_coding) == (
        "2bit",
        False,
        5,
        True,
    )
    assert read(
        compress_communication=True, zero={"hierarchical_compress": True}
    ).gradient_compression == compression(hierarchical_compress=True)
    assert compression(algorithm="TopK").algorithm == "topk"


def test_the_effective_configuration_holds_them():
    effective = read(compress_communication=True).effective()
    assert effective["gradient_compression"]["topk_ratio"] == 0.01
    assert "compress_communication" not in effective


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"topk_ratio": 0}, "topk_ratio is 0; expected a number above 0 and up to 1"),
        ({"topk_ratio": 1.5}, "topk_ratio is 1.5; expected a number above 0 and up to 1"),
        ({"topk_ratio": -0.1}, "topk_ratio is -0.1"),
        ({"topk_ratio": "auto"}, "topk_ratio is 'auto'"),
        ({"topk_ratio": "much"}, "topk_ratio is 'much'"),
        ({"algorithm": "3bit"}, "algorithm is '3bit'; expected one of: topk, 1bit, 2bit, none"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"topk_warmup_steps": -1}, "topk_warmup_steps is -1"),
        ({"topk_warmup_ratio": 0}, "topk_warmup_ratio is 0; expected a number above 0 and up to 1"),
        (
            {"topk_ratio": 0.5, "topk_warmup_steps": 9},
            "topk_warmup_ratio is 0.25, below the topk_ratio of 0.5 that follows it",
        ),
        ({"residual_decay": 0}, "residual_decay is 0; expected a number above 0 and up to 1"),
        ({"momentum_correction": 1.5}, "momentum_correction is 1.5; expected true or false"),
        (
            {"momentum_correction": True, "error_feedback": False},
            "momentum_correction does not go together with error_feedback false",
        ),
        (
            {"momentum_correction": True, "hierarchical_compress": True},
            "momentum_correction does not go together with hierarchical_compress",
        ),
        ({"error_feedback": 2}, "error_feedback is 2; expected true or false"),
        (
            {"topkratio": 0.1},
            "unknown key 'gradient_compression.topkratio'; did you mean 'gradient_compression.topk_ratio'",
        ),
    ],
)
def test_bad_values_are_one_clear_error(keys, said):
    with pytest.raises(ConfigError) as error:
        compression(**keys)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("algorithm", ["topk", "1bit", "2bit"])
def test_stage_3_is_refused_with_what_to_use(algorithm):
    with pytest.raises(ConfigError, match=f"{algorithm}.*stages 0, 1 and 2.*zero_quantized_gradients"):
        read(stage=3, gradient_compression={"algorithm": algorithm})


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="compress_communication is true, and gradient_compression says"):
        read(compress_communication=True, gradient_compression={"algorithm": "none"})
    with pytest.raises(ConfigError, match="hierarchical_compress is true, and gradients are not compressed"):
        read(zero={"hierarchical_compress": True})
    with pytest.raises(ConfigError, match="gradient_reduction is reduce_scatter; remove one"):
        read(zero={"gradient_reduction": "reduce_scatter"}, compress_communication=True)


def test_what_has_no_effect_is_said():
    notices = read(
        gradient_compression={"algorithm": "1bit", "topk_ratio": 0.1, "huffman_coding": True}
    ).notices
    assert any("topk_ratio has no effect with algorithm 1bit" in each for each in notices)
    assert any("huffman_coding has no effect with algorithm 1bit" in each for each in notices)


def test_the_share_that_topk_sends_falls_exponentially():
    keys = {"topk_ratio": 0.01, "topk_warmup_ratio": 0.16, "topk_warmup_steps": 4, "warmup_steps": 10}
    asked = compression(**keys)
    assert [asked.topk_ratio_of(step) for step in range(10, 16)] == pytest.approx(
        [0.16, 0.08, 0.04, 0.02, 0.01, 0.01]
    )
    assert compression(topk_ratio=0.02).topk_ratio_of(0) == 0.02


def test_clipping_before_the_residual_takes_the_place_of_clipping_the_sum():
    asked = read(gradient_clipping=2.0, gradient_compression={"clip_before_residual": True})
    assert (asked.gradient_clipping, asked.sum_clipping) == (2.0, 0.0)
    assert read(gradient_clipping=2.0, gradient_compression={}).sum_clipping == 2.0


def test_clipping_single_micro_batches_is_refused():
    keys = {"clip_before_residual": True}
    with pytest.raises(
        ConfigError, match=r"stage 2 sends those of each of 4 micro-batches.*use stage 0 or 1"
    ):
        read(stage=2, gradient_accumulation_steps=4, gradient_compression=keys)
    assert read(stage=1, gradient_accumulation_steps=4, gradient_compression=keys).gradient_compression
    once = {"gradient_accumulation_reduce": "boundary"}
    assert read(zero=once, gradient_accumulation_steps=4, gradient_compression=keys).gradient_compression


def test_convergence_keys_without_effect_are_said():
    for keys, said in (
        ({"clip_before_residual": True}, "clip_before_residual has no effect with gradient_clipping 0"),
        (
            {"residual_decay": 0.5, "error_feedback": False},
            "residual_decay has no effect with error_feedback false",
        ),
        (
            {"algorithm": "1bit", "topk_warmup_steps": 5},
            "topk_warmup_steps has no effect with algorithm 1bit",
        ),
    ):
        notices = read(gradient_clipping=0.0, gradient_compression=keys).notices
        assert any(said in each for each in notices), keys
