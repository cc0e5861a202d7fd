"""Grouped-query attention against sums written out in fp64, and against itself cut into steps."""

from typing import Any

import pytest
import torch

from soloist.kernels import attention as attention_module
from soloist.kernels import check
from soloist.kernels.attention import attention, attention_ref
from soloist.kernels.check import FLOATS
from soloist.kernels.rotary import apply_rotary, make_rotary_table
from tests.kernels.limits import LIMITS, Limit, assert_near

H, G, K, S = 6, 2, 10, 40
EPS = 1e-5
TABLE = make_rotary_table(K, 1e3, S + 5)


def make_caches(dtype: torch.dtype, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches filled with what nobody may read."""
    return torch.full((G, S, K), noise, dtype=dtype), torch.full((G, S, K), -noise, dtype=dtype)


def make_norms(dtype: torch.dtype) -> dict[str, Any]:
    return {"q_norm": (torch.rand(K) + 0.5).to(dtype), "k_norm": (torch.rand(K) + 0.5).to(dtype), "eps": EPS}


def run(
    qkv: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], context_len: int, norms: dict[str, Any]
) -> torch.Tensor:
    length = torch.tensor(context_len, dtype=torch.int32)
    return attention(qkv, *caches, length, TABLE.cos, TABLE.sin, num_heads=H, num_kv_heads=G, **norms)


def run_in_steps(
    qkv: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], steps: list[int], norms: dict[str, Any]
) -> torch.Tensor:
    assert sum(steps) == qkv.shape[0]
    outs, done = [], 0
    for num_tokens in steps:
        outs.append(run(qkv[done : done + num_tokens], caches, done, norms))
        done += num_tokens
    return torch.cat(outs)


def attention_fp64(qkv: torch.Tensor, norms: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend token by token and head by head: the output, and the keys and values in the cache's order."""
    q, k, v = qkv.double().view(-1, H + 2 * G, K).split((H, G, G), dim=1)
    if norms:
        q = q / (q.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norms["q_norm"].double()
        k = k / (k.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norms["k_norm"].double()
    cos, sin = TABLE.cos[: len(qkv)].double()[:, None], TABLE.sin[: len(qkv)].double()[:, None]
    rotate = lambda x: torch.cat(
        [x[..., : K // 2] * cos - x[..., K // 2 :] * sin, x[..., K // 2 :] * cos + x[..., : K // 2] * sin], dim=-1
    )
    # The cache rounds keys to its dtype.
    q, k = rotate(q), rotate(k).to(qkv.dtype).double()
    out = torch.full((len(qkv), H, K), torch.nan, dtype=torch.float64)
    for t in range(len(qkv)):
        for h in range(H):
            g = h // (H // G)
            weights = torch.softmax(k[: t + 1, g] @ q[t, h] / K**0.5, dim=0)
            out[t, h] = weights @ v[: t + 1, g]
    return out.flatten(1), k.transpose(0, 1), v.transpose(0, 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_attention_is_its_equation(dtype: torch.dtype, has_norms: bool, num_tokens: int):
    qkv = torch.randn(num_tokens, (H + 2 * G) * K).to(dtype)
    norms = make_norms(dtype) if has_norms else {}
    caches = make_caches(dtype, torch.nan)
    y = run(qkv, caches, 0, norms)
    expected, keys, values = attention_fp64(qkv, norms)
    assert y.dtype == dtype
    assert_near(y, expected)
    # One unit in the last place: fp32 and fp64 may round a key to neighbours.
    assert_near(caches[0][:, :num_tokens].flatten(0, 1), keys.flatten(0, 1))
    assert torch.equal(caches[1][:, :num_tokens].double(), values)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    "steps",
    [[1] * 23, [7, 7, 7, 2], [16, 1, 1, 5], [1, 22], [22, 1], [5, 16, 2]],
    ids=["tokens", "chunks", "prefill, decode, verify", "one first", "one last", "verify in the middle"],
)
def test_any_cut_into_steps_gives_the_same(steps: list[int], has_norms: bool):
    qkv = torch.randn(23, (H + 2 * G) * K)
    norms = make_norms(torch.float32) if has_norms else {}
    whole_caches, cut_caches = make_caches(torch.float32, torch.nan), make_caches(torch.float32, 1e4)
    whole = run(qkv, whole_caches, 0, norms)
    assert_near(run_in_steps(qkv, cut_caches, steps, norms), whole, Limit(rms=1e-6, worst_row=1e-5))
    for whole_cache, cut_cache in zip(whole_caches, cut_caches, strict=True):
        torch.testing.assert_close(cut_cache[:, :23], whole_cache[:, :23], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("query_block", [1, 3, 16, 64])
def test_blocks_of_queries_give_the_same(monkeypatch: pytest.MonkeyPatch, query_block: int):
    qkv = torch.randn(S, (H + 2 * G) * K)
    expected, _, _ = attention_fp64(qkv, {})
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", query_block)
    caches = make_caches(torch.float32, torch.nan)
    assert_near(run_in_steps(qkv, caches, [11, S - 11], {}), expected)


def test_no_mask_grows_with_the_square_of_a_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention_module, "QUERY_BLOCK", 4)
    shapes = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, **kw: (shapes.append(shape), ones(*shape, **kw))[1])
    run(torch.randn(S, (H + 2 * G) * K), make_caches(torch.float32, torch.nan), 0, {})
    assert [rows for rows, _ in shapes] == [4] * (S // 4)
    # A block sees no further than its last query.
    assert [columns for _, columns in shapes] == list(range(4, S + 1, 4))


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
@pytest.mark.parametrize("noise", [torch.nan, torch.inf, 1e4])
def test_rows_that_are_not_of_the_sequence_are_neither_read_nor_written(num_tokens: int, noise: float):
    qkv = torch.randn(5 + num_tokens, (H + 2 * G) * K)
    caches, other_caches = make_caches(torch.float32, noise), make_caches(torch.float32, 0.5)
    y, other = (run_in_steps(qkv, c, [5, num_tokens], {}) for c in (caches, other_caches))
    assert torch.equal(y, other)
    untouched = make_caches(torch.float32, noise)
    for cache, before in zip(caches, untouched, strict=True):
        torch.testing.assert_close(cache[:, 5 + num_tokens :], before[:, 5 + num_tokens :], equal_nan=True)


def test_a_step_repeated_over_rejected_rows_leaves_no_trace():
    qkv = torch.randn(9, (H + 2 * G) * K)
    expected, _, _ = attention_fp64(qkv, {})
    caches = make_caches(torch.float32, torch.nan)
    run(qkv[:4], caches, 0, {})
    # Five drafts of which none is kept.
    run(torch.randn(5, (H + 2 * G) * K) * 50, caches, 4, {})
    assert_near(run(qkv[4:], caches, 4, {}), expected[4:])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_one_token_is_computed_as_the_reference_does(dtype: torch.dtype, has_norms: bool):
    qkv = torch.randn(9, (H + 2 * G) * K).to(dtype)
    norms = make_norms(dtype) if has_norms else {"q_norm": None, "k_norm": None, "eps": EPS}
    caches = make_caches(dtype, torch.nan)
    run(qkv[:8], caches, 0, norms)
    ref_caches = tuple(cache.clone() for cache in caches)
    y = run(qkv[8:], caches, 8, norms)
    length = torch.tensor(8, dtype=torch.int32)
    ref = attention_ref(qkv[8:], *ref_caches, length, TABLE.cos, TABLE.sin, num_heads=H, num_kv_heads=G, **norms)
    # Both round the same fp32 values, but for their last bits.
    assert_near(y, ref, LIMITS[dtype])
    for cache, ref_cache in zip(caches, ref_caches, strict=True):
        assert torch.equal(cache[:, :9], ref_cache[:, :9])


def test_the_reference_switch_overrules_the_form_for_one_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(check, "_REFERENCE_EVERYWHERE", True)
    monkeypatch.setattr(attention_module, "_attention_row_cpu", None)
    qkv = torch.randn(1, (H + 2 * G) * K)
    expected, _, _ = attention_fp64(qkv, {})
    assert_near(run(qkv, make_caches(torch.float32, torch.nan), 0, {}), expected)


@pytest.mark.parametrize("num_kv_heads", [1, 3, 6])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_any_number_of_heads_may_share_keys(num_kv_heads: int, num_tokens: int):
    """Sharing keys is the same as giving every query head its own copy of them."""
    qkv = torch.randn(num_tokens, H + 2 * num_kv_heads, K)
    length = torch.tensor(0, dtype=torch.int32)
    outs = []
    for heads in (num_kv_heads, H):
        q, k, v = qkv.split((H, num_kv_heads, num_kv_heads), dim=1)
        k, v = (x.repeat_interleave(heads // num_kv_heads, dim=1) for x in (k, v))
        caches = torch.full((2, heads, S, K), torch.nan)
        rows = torch.cat([q, k, v], dim=1).flatten(1)
        outs.append(attention(rows, *caches, length, TABLE.cos, TABLE.sin, num_heads=H, num_kv_heads=heads))
    assert_near(*outs)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_large_scores_do_not_overflow(num_tokens: int):
    qkv = torch.randn(num_tokens + 4, (H + 2 * G) * K)
    qkv[:, : (H + G) * K] *= 200
    caches = make_caches(torch.float32, torch.nan)
    expected, _, _ = attention_fp64(qkv, {})
    # Scores of 1e5 keep two digits behind the point in fp32.
    assert_near(run_in_steps(qkv, caches, [4, num_tokens], {}), expected, Limit(rms=2e-2, worst_row=1e-1))


def test_positions_continue_behind_the_context():
    qkv = torch.randn(1, (H + 2 * G) * K)
    caches = (torch.zeros(G, S, K), torch.zeros(G, S, K))
    run(qkv, caches, 13, {})
    k = qkv.view(1, -1, K)[:, H : H + G]
    expected = apply_rotary(k, TABLE.cos[13:14], TABLE.sin[13:14], False)
    torch.testing.assert_close(caches[0][:, 13], expected[0])
    assert not caches[0][:, :13].any() and not caches[0][:, 14:].any()


def test_arguments_of_other_sizes_are_refused():
    qkv, caches = torch.zeros(3, (H + 2 * G) * K), make_caches(torch.float32, 0.0)
    with pytest.raises(AssertionError, match="qkv: axis C is 99, expected 100"):
        run(qkv[:, 1:], caches, 0, {})
    with pytest.raises(AssertionError, match="v_cache: axis S is 39, expected 40"):
        run(qkv, (caches[0], caches[1][:, 1:]), 0, {})
    with pytest.raises(AssertionError, match=r"k_cache: dtype torch.float32, expected torch.bfloat16"):
        run(qkv.bfloat16(), caches, 0, {})
    with pytest.raises(AssertionError, match="q_norm: axis K is 9, expected 10"):
        run(qkv, caches, 0, {**make_norms(torch.float32), "q_norm": torch.zeros(K - 1)})
