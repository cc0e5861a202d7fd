"""Named axes, and the switch that runs references everywhere."""

import importlib.util

import pytest
import torch

from soloist.kernels import check
from soloist.kernels.check import FLOATS, expect, use_reference


def test_new_letters_are_remembered_with_their_sizes():
    dims = {"T": 3}
    expect(torch.zeros(3, 5, 7), "T H K", torch.float32, dims, name="q")
    assert dims == {"T": 3, "H": 5, "K": 7}


def test_one_letter_is_one_size_within_a_call():
    dims: dict[str, int] = {}
    expect(torch.zeros(3, 5), "T D", torch.float32, dims, name="x")
    with pytest.raises(AssertionError, match=r"weight: axis D is 4, expected 5 \(shape \(4,\), axes \[D\]\)"):
        expect(torch.zeros(4), "D", torch.float32, dims, name="weight")


def test_a_letter_twice_in_one_argument_is_one_size():
    expect(torch.zeros(4, 4), "D D", torch.float32, {}, name="w")
    with pytest.raises(AssertionError, match="w: axis D is 5, expected 4"):
        expect(torch.zeros(4, 5), "D D", torch.float32, {}, name="w")


def test_a_number_stands_for_itself():
    dims: dict[str, int] = {}
    expect(torch.zeros(6, 4), "C 4", torch.float32, dims, name="conv")
    assert dims == {"C": 6}
    with pytest.raises(AssertionError, match="conv: axis 4 is 3, expected 4"):
        expect(torch.zeros(6, 3), "C 4", torch.float32, {}, name="conv")


def test_no_axes_mean_a_scalar():
    expect(torch.zeros((), dtype=torch.int32), "", torch.int32, {}, name="context_len")
    with pytest.raises(AssertionError, match=r"context_len: expected axes \[\], got shape \(1,\)"):
        expect(torch.zeros(1, dtype=torch.int32), "", torch.int32, {}, name="context_len")


@pytest.mark.parametrize("shape", [(3,), (3, 5, 1)])
def test_the_number_of_axes_is_checked(shape: tuple[int, ...]):
    with pytest.raises(AssertionError, match=r"x: expected axes \[T D\]"):
        expect(torch.zeros(shape), "T D", torch.float32, {}, name="x")


def test_a_dtype_is_one_of_those_allowed():
    expect(torch.zeros(2, dtype=torch.bfloat16), "D", FLOATS, {}, name="x")
    with pytest.raises(AssertionError, match=r"x: dtype torch.float64, expected \(torch.float32"):
        expect(torch.zeros(2, dtype=torch.float64), "D", FLOATS, {}, name="x")
    with pytest.raises(AssertionError, match=r"x: dtype torch.float16, expected torch.float32"):
        expect(torch.zeros(2, dtype=torch.float16), "D", torch.float32, {}, name="x")


def test_cpu_tensors_take_the_reference():
    assert use_reference(torch.zeros(1))


@pytest.mark.parametrize(("value", "is_set"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_environment_sets_the_reference_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, is_set: bool):
    monkeypatch.delenv("SOLOIST_REFERENCE", raising=False)
    if value is not None:
        monkeypatch.setenv("SOLOIST_REFERENCE", value)
    # A second copy of the module: the one in use has read the environment already.
    spec = importlib.util.spec_from_file_location("second_check", check.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.use_reference_everywhere() is is_set
