"""Test the settings with which ``communication.bounded_delay`` can be combined."""

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.communication_block import check_whole
from zero_runtime.errors import ConfigError

GIVEN = {"train_micro_batch_size_per_gpu": 1, "communication": {"bounded_delay": 2}}


@pytest.mark.parametrize(
    ("others", "named"),
    [
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage 1.*use stage 0"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage 2"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage 3"),
        ({"fp16": {"enabled": True}}, "loss scale"),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "loss scale"),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, "loss scale"),
        ({"communication": {"bounded_delay": 2, "topology": [1, 4]}}, "communication.topology"),
        (
            {"communication": {"bounded_delay": 2, "slow_node_tolerance": 0.5}},
            "communication.slow_node_tolerance",
        ),
        ({"gradient_compression": {}}, "gradient_compression"),
        ({"optimizer": {"type": "OneBitAdam"}}, "communication.bounded_delay"),
    ],
)
def test_what_it_does_not_go_together_with_is_refused_by_name(others, named):
    with pytest.raises(ConfigError, match=named) as error:
        RuntimeConfig.from_mapping({**GIVEN, **others}, 4)
    assert "bounded_delay" in str(error.value)


@pytest.mark.parametrize("others", [{}, {"bf16": {"enabled": True}}, {"gradient_clipping": 1.0}])
def test_it_goes_together_with_these(others):
    config = RuntimeConfig.from_mapping({**GIVEN, **others}, 4)
    assert config.effective()["communication"]["bounded_delay"] == 2


@pytest.mark.parametrize("value", [-1, 0.5, None, "two"])
def test_a_delay_is_a_whole_number_of_steps(value):
    with pytest.raises(ConfigError, match=r"communication\.bounded_delay is"):
        RuntimeConfig.from_mapping({**GIVEN, "communication": {"bounded_delay": value}}, 4)


def test_it_is_refused_where_ranks_share_a_model():
    config = RuntimeConfig.from_mapping(GIVEN, 4).communication
    check_whole(config, shared=False)
    with pytest.raises(ConfigError, match="samples of its own on every rank"):
        check_whole(config, shared=True)
