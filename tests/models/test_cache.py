"""The words that move a cache: commit, rollback, snapshot, restore, reset; on attention rows and on recurrent state."""

import pytest
import torch

from soloist.errors import ContextLengthError, UnsupportedError
from soloist.models import load_model
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from tests.miniature import write_checkpoint
from tests.models.dense_oracle import make_noisy_cache, prefill, random_ids, run

FAMILIES = ("qwen3", "bailing_moe_v3", "kimi_linear")


@pytest.fixture(params=FAMILIES, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=5, dtype=torch.float32)
    return load_model(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = write_checkpoint(tmp_path_factory.mktemp("dense"), "llama", seed=6, dtype=torch.float32)
    return load_model(folder, dtype=torch.float32)


def test_commit_advances_by_the_rows_it_is_told(model: CausalLM) -> None:
    ids = random_ids(model, 9)
    cache = model.make_cache(32, max_width=4)
    assert cache.context_len.dtype == torch.int32 and cache.context_len.shape == ()
    run(model, cache, ids)
    assert int(cache.context_len) == 9
    run(model, cache, ids[:1], StepKind.DECODE)
    assert int(cache.context_len) == 10
    # A device scalar, as the engine has it.
    model.forward(ids[:4], cache, StepKind.VERIFY)
    cache.commit(torch.tensor(3, dtype=torch.int32), StepKind.VERIFY)
    assert int(cache.context_len) == 13


def test_a_commit_of_verified_rows_equals_decoding_them(model: CausalLM) -> None:
    ids = random_ids(model, 21)
    plain = model.make_cache(40)
    expected = [run(model, plain, ids[:11])[-1:]]
    expected += [run(model, plain, i, StepKind.DECODE) for i in ids[11:].split(1)]
    cache = model.make_cache(40, max_width=5)
    got = [run(model, cache, ids[:11])[-1:]]
    done = 11
    for num_rows in (2, 1, 4, 3):
        # Rows behind the committed ones are rejected drafts.
        rows = torch.cat([ids[done : done + num_rows], random_ids(model, 5 - num_rows, seed=done)])
        got.append(run(model, cache, rows, StepKind.VERIFY, num_rows)[:num_rows])
        done += num_rows
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-4, rtol=0)


def test_a_restored_snapshot_continues_as_if_nothing_had_come_after(model: CausalLM) -> None:
    ids, other = random_ids(model, 20), random_ids(model, 20, seed=2)
    cache = model.make_cache(48)
    run(model, cache, ids[:12])
    snapshot = cache.snapshot()
    expected = run(model, cache, ids[12:])
    run(model, cache, other)
    cache.restore(snapshot)
    assert int(cache.context_len) == 12
    torch.testing.assert_close(run(model, cache, ids[12:]), expected, atol=0, rtol=0)


def test_a_snapshot_is_a_copy_that_another_cache_can_take(model: CausalLM) -> None:
    ids = random_ids(model, 20)
    first = model.make_cache(48)
    run(model, first, ids[:12])
    snapshot = first.snapshot().to("cpu")
    expected = run(model, first, ids[12:])
    first.reset()
    run(model, first, ids.flip(0))
    second = model.make_cache(33)
    if second.kv is not None:
        second.kv.k.normal_(0.0, 1e4)
    if second.recurrent is not None:
        second.recurrent.state.normal_(0.0, 1e4)
        second.recurrent.conv.normal_(0.0, 1e4)
    second.restore(snapshot)
    torch.testing.assert_close(run(model, second, ids[12:]), expected, atol=0, rtol=0)


def test_a_snapshot_says_its_bytes(model: CausalLM) -> None:
    cache = model.make_cache(64)
    run(model, cache, random_ids(model, 7))
    seven = cache.snapshot().num_bytes
    run(model, cache, random_ids(model, 7))
    rows = sum(t[..., :7, :].numel() * 4 for t in (cache.kv.k, cache.kv.v)) if cache.kv else 0
    rows += cache.latent.latent[:, :7].numel() * 4 if cache.latent else 0
    assert cache.snapshot().num_bytes - seven == rows > 0


def test_reset_forgets_everything(model: CausalLM) -> None:
    ids = random_ids(model, 13)
    cache = model.make_cache(32)
    expected = run(model, cache, ids)
    run(model, cache, ids.flip(0))
    cache.reset()
    torch.testing.assert_close(run(model, cache, ids), expected, atol=0, rtol=0)


def test_a_rollback_leaves_no_trace(dense: CausalLM) -> None:
    ids, wrong = random_ids(dense, 20), random_ids(dense, 9, seed=3)
    expected = prefill(dense, make_noisy_cache(dense, 32), ids, [20])
    cache = make_noisy_cache(dense, 32)
    assert cache.can_rollback
    run(dense, cache, ids[:11])
    run(dense, cache, wrong)
    cache.rollback(11)
    assert int(cache.context_len) == 11
    torch.testing.assert_close(run(dense, cache, ids[11:]), expected[11:], atol=1e-5, rtol=0)


def test_a_recurrent_state_refuses_to_roll_back(model: CausalLM) -> None:
    cache = model.make_cache(16)
    run(model, cache, random_ids(model, 5))
    assert cache.can_rollback == (cache.recurrent is None)
    if not cache.can_rollback:
        with pytest.raises(UnsupportedError, match="snapshot"):
            cache.rollback(3)
        assert int(cache.context_len) == 5


def test_a_context_longer_than_the_models_is_refused(model: CausalLM) -> None:
    with pytest.raises(ContextLengthError, match=r"1025.*1024"):
        model.make_cache(1025)


def test_a_capture_keeps_the_streams_behind_the_layers_that_are_asked_for(dense: CausalLM) -> None:
    ids = random_ids(dense, 6)
    last = dense.config.num_hidden_layers - 1
    hidden = torch.full((8, 3, dense.config.hidden_size), torch.nan)
    cache = dense.make_cache(16)
    out = dense.forward(ids, cache, StepKind.PREFILL, capture=HiddenCapture(layers=(-1, 1, last), hidden=hidden))
    assert torch.equal(hidden[:6, 2], out)
    assert torch.equal(hidden[:6, 0], dense.embed_tokens[ids])  # type: ignore[attr-defined]
    assert not torch.allclose(hidden[:6, 1], hidden[:6, 0]) and hidden[6:].isnan().all()
