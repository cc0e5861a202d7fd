"""The model at work: room for rows behind the context, captured states, threads."""

import time
from pathlib import Path

import pytest
import torch

from soloist.errors import ContextLengthError, DoesNotFitError, UsageError
from soloist.kernels.allreduce import TensorParallel
from soloist.models import load_model
from soloist.models.causal_lm import CausalLM
from soloist.runtime.runner import ModelRunner, measure_num_threads
from tests.miniature import miniature_config, write_checkpoint
from tests.scripted import TableModel


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load_model(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", seed=3), dtype=torch.float32)


def table(max_context_len: int) -> TableModel:
    return TableModel(7, lambda positions, input_ids: torch.zeros(len(positions), 7), max_context_len=max_context_len)


def test_every_chunk_of_a_prompt_knows_where_it_begins(monkeypatch: pytest.MonkeyPatch):
    runner = ModelRunner(table(40), chunk_tokens=4)
    forward, begins = runner.model.forward, []

    def noting_forward(*args, **kwargs):
        begins.append(runner.cache.host_len)
        assert runner.cache.host_len == int(runner.cache.context_len)
        return forward(*args, **kwargs)

    monkeypatch.setattr(runner.model, "forward", noting_forward)
    for num_tokens in (6, 9):
        assert runner.prefill(torch.zeros(num_tokens, dtype=torch.int64), on_chunk=lambda *_: None)
    assert begins == [0, 4, 6, 10, 14]
    # A step does not: nobody keeps the number up to date.
    assert runner.cache.host_len is None


@pytest.mark.parametrize(
    ("limit", "asked", "max_width", "context", "rows"),
    [
        (100, None, 1, 100, 100),
        (100, 40, 1, 40, 40),
        (100, 40, 16, 40, 55),
        (100, None, 16, 85, 100),
        (100, 95, 2, 95, 96),
        (100, 85, 16, 85, 100),
        (100, 100, 1, 100, 100),
    ],
)
def test_rows_behind_the_context_are_there_besides_what_was_asked_for(
    limit: int, asked: int | None, max_width: int, context: int, rows: int
):
    runner = ModelRunner(table(limit), max_context_len=asked, max_width=max_width)
    assert (runner.max_context_len, runner.cache.max_context_len) == (context, rows)


@pytest.mark.parametrize(
    ("asked", "max_width", "message"),
    [
        (100, 16, "the model has 100, and a step with drafts needs 15 of them behind .*: ask for at most 85 tokens"),
        (86, 16, "a context of 86 tokens is asked for; .*: ask for at most 85 tokens"),
        (100, 2, "ask for at most 99 tokens"),
        (101, 1, "a context of 101 tokens is asked for; the model has 100: ask for at most 100 tokens"),
        (500, 4, "ask for at most 97 tokens"),
    ],
)
def test_no_token_of_a_context_that_was_asked_for_is_lost_without_a_word(asked: int, max_width: int, message: str):
    with pytest.raises(ContextLengthError, match=message):
        ModelRunner(table(100), max_context_len=asked, max_width=max_width)


def test_a_context_the_model_does_not_allow_is_refused(llama):
    with pytest.raises(ContextLengthError):
        ModelRunner(llama, max_context_len=2000)
    with pytest.raises(UsageError, match="a context of 1 tokens; allowed: at least 2"):
        ModelRunner(llama, max_context_len=1)


@pytest.mark.parametrize("family", ["llama", "bailing_moe_v3"])
def test_a_context_that_does_not_fit_is_refused_with_the_largest_that_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = load_model(write_checkpoint(tmp_path / family, family, seed=3), dtype=torch.float32)
    footprint = model.footprint
    free = footprint.state_bytes + footprint.conv_state_bytes + 57.5 * footprint.kv_bytes_per_position
    monkeypatch.setattr("soloist.models.memory.free_bytes", lambda device: free)
    with pytest.raises(DoesNotFitError, match=r"a context of .* GiB are free.*; the largest context that fits is 54"):
        ModelRunner(model, max_context_len=100, max_width=4)
    runner = ModelRunner(model, max_context_len=54, max_width=4)
    assert runner.max_context_len == 54
    # The latents of one token more would fit, the recurrent state beside them would not.
    if family == "llama":
        with pytest.raises(DoesNotFitError):
            ModelRunner(model, max_context_len=55, max_width=4)
    monkeypatch.setattr("soloist.models.memory.free_bytes", lambda device: 10)
    with pytest.raises(DoesNotFitError, match="no context fits beside the weights"):
        ModelRunner(model, max_context_len=100, max_width=4)


def test_room_for_steps_and_prompts_is_left_beside_the_context(llama, monkeypatch: pytest.MonkeyPatch):
    position_bytes = llama.footprint.kv_bytes_per_position
    monkeypatch.setattr("soloist.runtime.runner._SCRATCH_BYTES", {"cpu": 40 * position_bytes})
    monkeypatch.setattr("soloist.models.memory.free_bytes", lambda device: 100 * position_bytes)
    # The cache alone would fit.
    with pytest.raises(DoesNotFitError, match=r"a context of 61 tokens, with room to work,.* that fits is 60 tokens"):
        ModelRunner(llama, max_context_len=61)
    assert ModelRunner(llama, max_context_len=60).max_context_len == 60


# Of sizes that 4 ranks can share, with more key/value heads than ranks, and with fewer.
SHARED = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 64, "vocab_size": 256},
    "qwen2": {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 208},
    "bailing_moe_v3": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "vocab_size": 132,
    },
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("family", SHARED)
def test_a_context_is_as_large_as_this_ranks_memory_allows(
    family: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """What a rank counts of its cache is what it allocates: nothing is divided by the ranks once more."""
    config = miniature_config(family, **SHARED[family])
    group = TensorParallel(rank=0, size=num_ranks)
    model = load_model(config, dtype=torch.float32, weights="random", group=group)
    cache = model.make_cache(90)
    held = 0
    for part in (cache.kv, cache.latent, cache.recurrent):
        if part is not None:
            names = {"k", "v", "latent", "state", "conv"} & vars(part).keys()
            held += sum(vars(part)[name].numel() * vars(part)[name].element_size() for name in names)
    footprint = model.footprint
    fixed = footprint.state_bytes + footprint.conv_state_bytes
    assert held == fixed + 90 * footprint.kv_bytes_per_position
    assert footprint.kv_bytes_per_position and (fixed > 0) == (family == "bailing_moe_v3")
    # As on a GPU, where all of it is asked for before any is allocated.
    monkeypatch.setattr("soloist.runtime.runner._SCRATCH_BYTES", {"cpu": 4096})
    room = held + 90 * model.prompt_bytes_per_position + 4096
    assert (model.prompt_bytes_per_position > 0) == (family == "bailing_moe_v3")
    monkeypatch.setattr("soloist.models.memory.free_bytes", lambda device: room)
    with pytest.raises(DoesNotFitError, match="the largest context that fits is 90 tokens"):
        ModelRunner(model, max_context_len=91)
    assert ModelRunner(model, max_context_len=90).max_context_len == 90


def test_padding_rows_of_the_head_are_cut_off(llama):
    runner = ModelRunner(llama, num_tokens=250)
    hidden = runner.forward(1)
    logits = runner.compute_logits(hidden)
    assert hidden.shape == (1, 60) and logits.shape == (1, 250)


def test_a_finite_model_has_no_layer_to_name(llama):
    runner = ModelRunner(llama)
    assert "finite values everywhere" in runner.locate_non_finite([1, 2, 3])
    assert int(runner.cache.context_len) == 0


def test_the_search_names_a_position_behind_its_first_piece(tmp_path):
    model = load_model(write_checkpoint(tmp_path / "llama", "llama", seed=3), dtype=torch.float32)
    model.embed_tokens[200] = float("nan")
    found = ModelRunner(model).locate_non_finite([1] * 40 + [200, 3])
    assert found == "the embedding is the first whose output is not finite, at position 40"


@pytest.mark.parametrize(
    ("step_ms", "best"),
    [({8: 4, 4: 2, 2: 1, 1: 3}, 2), ({8: 1, 4: 2, 2: 4, 1: 8}, 8), ({8: 8, 4: 4, 2: 2, 1: 1}, 1), ({1: 1}, 1)],
)
def test_threads_are_halved_as_long_as_a_step_gets_faster(monkeypatch, step_ms: dict[int, int], best: int):
    used = [max(step_ms)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: max(step_ms))
    monkeypatch.setattr(torch, "set_num_threads", lambda n: used.append(n))
    runner, clock_s = ModelRunner(table(50)), [0.0]

    def forward(num_rows: int) -> None:
        clock_s[0] += step_ms[used[-1]] * 1e-3

    monkeypatch.setattr(runner, "forward", forward)
    monkeypatch.setattr(time, "perf_counter", lambda: clock_s[0])
    assert measure_num_threads(runner) == best
