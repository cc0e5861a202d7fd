"""Sampling parameters: every field is applied or refused, with what was given and what is allowed."""

import dataclasses
import inspect
import math

import pytest

from soloist.errors import UsageError
from soloist.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 (greedy), or from 0.00001 to 100000"),
        ("temperature", 1e-9, "0 (greedy)"),
        ("temperature", math.nan, "0 (greedy)"),
        ("temperature", math.inf, "0 (greedy)"),
        # Finite, but not in fp32, and an integer that no float holds.
        ("temperature", 1e39, "0 (greedy)"),
        ("frequency_penalty", 10**400, "from -2 to 2"),
        ("temperature", "hot", "0 (greedy)"),
        ("temperature", None, "0 (greedy)"),
        ("top_k", 0, "at least 1, or None for all tokens"),
        ("top_k", -1, "at least 1"),
        ("top_k", 4.0, "at least 1"),
        ("top_k", True, "at least 1"),
        ("top_p", 0.0, "up to 1"),
        ("top_p", 1.01, "up to 1"),
        ("min_p", -0.1, "from 0 to 1"),
        ("min_p", 1.1, "from 0 to 1"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", -2.5, "from -2 to 2"),
        ("logit_bias", {3: 101.0}, "from -100 to 100"),
        ("logit_bias", {"3": 1.0}, "token ids as keys"),
        ("seed", 2**63, "a 64-bit signed integer"),
        ("seed", 1.5, "a 64-bit signed integer"),
        ("max_tokens", -1, "at least 0"),
        ("min_tokens", -1, "from 0 to max_tokens"),
        ("stop_token_ids", [-2], "token ids"),
        ("stop_token_ids", ["a"], "token ids"),
        ("logprobs", 21, "from 0 to 20, or None"),
        ("logprobs", -1, "from 0 to 20"),
        ("stop", [""], "texts that are not empty"),
        ("stop", "", "texts that are not empty"),
        ("stop", [3], "texts that are not empty"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(field: str, value: object, allowed: str):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field) and "allowed: " in message and allowed in message


def test_sixty_four_stop_strings_are_allowed_and_sixty_five_are_not():
    assert len(SamplingParams(stop=[f"s{i}" for i in range(64)]).stop_strings) == 64
    with pytest.raises(UsageError, match="stop holds 65 texts; at most 64"):
        SamplingParams(stop=[f"s{i}" for i in range(65)])


def test_more_tokens_at_least_than_at_most_are_refused():
    with pytest.raises(UsageError, match=r"min_tokens is 6; allowed: from 0 to max_tokens \(5\)"):
        SamplingParams(min_tokens=6, max_tokens=5)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1e-5},
        {"temperature": 5},
        {"temperature": 1e5},
        {"top_p": 1},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"max_tokens": 0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"logit_bias": {0: -100}},
    ],
)
def test_values_at_the_edges_are_allowed(fields: dict):
    SamplingParams(**fields)


def test_unknown_fields_and_positions_are_errors():
    with pytest.raises(TypeError):
        SamplingParams(heat=1.0)
    with pytest.raises(TypeError):
        SamplingParams(0.5)


def test_what_was_given_may_change_later():
    stop, bias = ["a"], {1: 1.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert params.stop_strings == ("a",) and dict(params.logit_bias) == {1: 1.0}
    assert dataclasses.replace(params, seed=3).stop_strings == ("a",)


def test_one_stop_string_is_not_its_letters():
    assert SamplingParams(stop="END").stop_strings == ("END",)


def test_every_field_is_documented():
    source = inspect.getsource(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        line = source[source.index(f"    {field.name}:") :].splitlines()[1]
        assert line.strip().startswith('"""'), field.name
