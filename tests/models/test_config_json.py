"""What holds for reading any config.json."""

import pytest

from soloist.errors import UnsupportedError
from soloist.kernels.rotary import Llama3Scaling, YarnScaling
from soloist.models.config_json import ConfigReader, take_rope


def reader(**keys) -> ConfigReader:
    return ConfigReader({"architectures": ["XForCausalLM"]} | keys, "XForCausalLM")


def test_what_nobody_takes_is_refused_by_name():
    left = reader(hidden_size=8, logit_softcap=30.0, attention_sinks=True, torch_dtype="bfloat16", _name_or_path="x")
    assert left.take("hidden_size", int) == 8
    with pytest.raises(UnsupportedError, match="attention_sinks, logit_softcap"):
        left.finish()


def test_the_config_given_is_not_changed():
    config_json = {"architectures": ["XForCausalLM"], "hidden_size": 8}
    ConfigReader(config_json, "XForCausalLM").take("hidden_size", int)
    assert config_json == {"architectures": ["XForCausalLM"], "hidden_size": 8}


@pytest.mark.parametrize("architectures", [None, [], ["YForCausalLM"]])
def test_another_architecture_is_refused(architectures):
    with pytest.raises(UnsupportedError, match="architectures"):
        ConfigReader({"architectures": architectures}, "XForCausalLM")


@pytest.mark.parametrize("key", ["quantization_config", "quantization"])
def test_quantised_checkpoints_are_refused_and_null_is_not_quantised(key):
    with pytest.raises(UnsupportedError, match=key):
        reader(**{key: {"bits": 4}})
    reader(**{key: None}).finish()


@pytest.mark.parametrize(
    ("value", "kind"), [("8", int), (True, int), (8.0, int), (1, bool), ("x", float), (True, float), ([1], dict)]
)
def test_a_value_of_another_type_is_refused(value, kind):
    with pytest.raises(UnsupportedError, match=f"size is .* {kind.__name__}"):
        reader(size=value).take("size", kind)


def test_an_integer_may_stand_for_a_float():
    value = reader(theta=10000).take("theta", float)
    assert value == 10000.0 and type(value) is float


def test_absent_and_null_mean_the_default():
    assert reader().take("size", int, 3) == reader(size=None).take("size", int, 3) == 3
    assert reader(size=0).take("size", int, 3) == 0
    assert reader(size=None).take_optional("size", int) is None
    with pytest.raises(UnsupportedError, match="size is missing"):
        reader(size=None).take("size", int)


def test_a_value_that_is_not_implemented_is_refused():
    reader(act="silu").require("act", "silu")
    reader().require("act", "silu")
    for key, value, allowed in [
        ("act", "gelu", "silu"),
        ("bias", True, False),
        ("bias", 0, False),
        ("layers", True, 1),
    ]:
        with pytest.raises(UnsupportedError, match=f"{key} is {value!r}"):
            reader(**{key: value}).require(key, allowed)


def test_end_ids_are_one_or_many():
    assert reader(eos_token_id=5).take_eos_token_ids() == (5,)
    assert reader(eos_token_id=[5, 7]).take_eos_token_ids() == (5, 7)
    assert reader().take_eos_token_ids() == ()
    with pytest.raises(UnsupportedError, match="eos_token_id"):
        reader(eos_token_id="</s>").take_eos_token_ids()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_theta": 1e4}, (1e4, None)),
        ({"rope_theta": 10000, "rope_scaling": None}, (1e4, None)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, (1e6, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, (5e5, Llama3Scaling(**LLAMA3))),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            (1e6, YarnScaling(factor=4.0, original_max_position_embeddings=512)),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 16}},
            (1e6, YarnScaling(factor=4.0, original_max_position_embeddings=512, beta_fast=16)),
        ),
    ],
)
def test_every_form_of_rotary_settings_is_read(keys, expected):
    left = reader(**keys)
    assert take_rope(left, max_position_embeddings=512) == expected
    left.finish()


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({}, "rope_theta is missing"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta is 10000, and 100000"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'; supported are"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "llama3", "factor": 2.0}}, "supported are"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0, "odd": 1}}, "odd"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn"}}, "factor"),
        ({"rope_theta": 1e4, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_rotary_settings_that_are_not_implemented_are_refused(keys, complaint):
    with pytest.raises(UnsupportedError, match=complaint):
        take_rope(reader(**keys), max_position_embeddings=512)
