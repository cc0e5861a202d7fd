"""Attention kernels equal the reference at every width and length, and touch no row of the cache that is not theirs."""

import pytest
import torch

pytest.importorskip("triton")

from soloist.errors import UnsupportedError
from soloist.kernels import attention, attention_triton
from soloist.kernels.attention import attention_ref
from soloist.kernels.launch import IS_INTERPRETED
from soloist.kernels.rotary import make_rotary_table
from tests.kernels.device import DEVICE, DTYPE, launch_kernels
from tests.kernels.limits import Limit, assert_near

# Queries, keys and softmax weights are rounded on the way: three times what one rounding of the result costs.
LIMIT = {torch.float32: Limit(rms=1e-6, worst_row=1e-5), torch.bfloat16: Limit(rms=6e-3, worst_row=1.5e-2)}[DTYPE]
EPS = 1e-6
S = 150
STEP = attention_triton.SplitSettings(splits=4, block_s=16, warps=4)


class Case:
    """Inputs of one call, the cache filled with noise behind `context_len`."""

    def __init__(self, T: int, context_len: int, *, H: int = 6, G: int = 2, K: int = 64, has_norm: bool = True) -> None:
        torch.manual_seed(T * 1000 + context_len)
        C = (H + 2 * G) * K
        buffer = torch.full((T + 2, C + 16), 1e30, device=DEVICE, dtype=DTYPE)
        buffer[:T, :C] = torch.randn(T, C, device=DEVICE)
        self.qkv, self.num_heads, self.num_kv_heads = buffer[:T, :C], H, G
        self.k_cache = torch.randn(G, S, K, device=DEVICE).to(DTYPE)
        self.v_cache = torch.randn(G, S, K, device=DEVICE).to(DTYPE) * 0.7
        self.k_cache[:, context_len:] = 1e4
        self.v_cache[:, context_len:] = -1e4
        self.T, self.start = T, context_len
        self.context_len = torch.tensor(context_len, dtype=torch.int32, device=DEVICE)
        table = make_rotary_table(K, 1e4, S, device=DEVICE)
        self.cos, self.sin = table.cos, table.sin
        self.q_norm, self.k_norm = (
            [torch.rand(K, device=DEVICE).add(0.5).to(DTYPE) for _ in range(2)] if has_norm else (None, None)
        )

    def run(self, launch, *settings, limit: Limit = LIMIT) -> torch.Tensor:
        """Compare output and caches with the reference."""
        k_ref, v_ref = self.k_cache.clone(), self.v_cache.clone()
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        ref = attention_ref(
            self.qkv.contiguous(), k_ref, v_ref, self.context_len, self.cos, self.sin, **heads, **norms
        ).float()
        before = self.k_cache.clone(), self.v_cache.clone()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        out = launch(
            self.qkv,
            self.k_cache,
            self.v_cache,
            self.context_len,
            self.cos,
            self.sin,
            self.num_heads,
            self.q_norm,
            self.k_norm,
            EPS,
            *settings,
        )
        assert_near(out, ref, limit)
        new = slice(self.start, self.start + self.T)
        assert torch.equal(self.v_cache, v_ref)
        assert_near(self.k_cache[:, new], k_ref[:, new], limit)
        for cache, old in zip((self.k_cache, self.v_cache), before, strict=True):
            cache[:, new] = old[:, new]
            assert torch.equal(cache, old), "a row outside the step was written"
        return out


@pytest.mark.parametrize(("T", "context_len"), [(1, 0), (2, 1), (5, 16), (1, 61), (16, 61), (5, 130), (16, 134)])
def test_step_equals_its_reference(T: int, context_len: int):
    Case(T, context_len, has_norm=T != 2).run(attention_triton.attend_step, STEP)


@pytest.mark.parametrize(("H", "G", "K"), [(3, 3, 64), (8, 1, 128), (7, 1, 64)])
def test_step_folds_any_group_of_heads(H: int, G: int, K: int):
    settings = attention_triton.SplitSettings(splits=2, block_s=32, warps=4, stages=1)
    Case(3, 77, H=H, G=G, K=K).run(attention_triton.attend_step, settings)


def test_step_cuts_more_rows_than_a_tile_holds_into_blocks():
    Case(16, 40, H=9, G=1).run(attention_triton.attend_step, STEP)


@pytest.mark.parametrize(("T", "context_len"), [(1, 0), (37, 0), (21, 50), (17, 64)])
def test_prompt_equals_its_reference(T: int, context_len: int):
    Case(T, context_len, has_norm=T != 21).run(lambda *a: attention_triton.attend_prompt(*a, block_t=16, block_s=16))


def test_both_forms_agree_where_they_meet():
    step = Case(16, 33).run(attention_triton.attend_step, STEP)
    prompt = Case(16, 33).run(lambda *a: attention_triton.attend_prompt(*a, block_t=16, block_s=16))
    assert_near(step, prompt, LIMIT)


def test_step_gives_the_same_bits_every_time():
    first = Case(9, 140).run(attention_triton.attend_step, STEP)
    for _ in range(1 if IS_INTERPRETED else 20):
        assert torch.equal(Case(9, 140).run(attention_triton.attend_step, STEP), first)


@pytest.mark.parametrize(("T", "form"), [(16, "attend_step"), (17, "attend_prompt")])
def test_launcher_takes_the_form_for_the_width(monkeypatch: pytest.MonkeyPatch, T: int, form: str):
    launch_kernels(monkeypatch, attention)
    monkeypatch.setattr(attention.step_cpu, "can_attend", lambda *_: False)
    case, taken = Case(T, 45), []
    run = getattr(attention_triton, form)
    monkeypatch.setattr(attention_triton, form, lambda *args: taken.append(form) or run(*args))
    for name in ("qkv", "k_cache", "v_cache", "q_norm", "k_norm"):
        setattr(case, name, getattr(case, name).bfloat16())

    def launch(qkv, k_cache, v_cache, context_len, cos, sin, num_heads, q_norm, k_norm, eps):
        heads = {"num_heads": num_heads, "num_kv_heads": case.num_kv_heads}
        norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        return attention.attention(qkv, k_cache, v_cache, context_len, cos, sin, **heads, **norms)

    # The interpreter truncates to bf16, several times.
    case.run(launch, limit=Limit(rms=3e-2, worst_row=6e-2))
    assert taken == [form]


@pytest.mark.parametrize("T", [1, 16, 17])
@pytest.mark.parametrize(
    ("dtype", "K", "message"),
    [
        (torch.float32, 64, r"in torch\.float32 has no GPU kernel; it takes bfloat16 and float16: run"),
        (torch.bfloat16, 80, r"heads of 80 has no GPU kernel; it takes heads of 32, 64, 128: run the model on the CPU"),
        (torch.bfloat16, 256, "heads of 256 has no GPU kernel"),
        (torch.float16, 16, "heads of 16 has no GPU kernel"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, T: int, dtype: torch.dtype, K: int, message: str
):
    launch_kernels(monkeypatch, attention)
    # What a CPU has of its own comes first.
    monkeypatch.setattr(attention.step_cpu, "can_attend", lambda *_: False)
    monkeypatch.setattr(attention, "use_reference_everywhere", lambda: True)
    qkv, cache = torch.zeros(T, 4 * K, dtype=dtype), torch.zeros(1, 20, K, dtype=dtype)
    table = make_rotary_table(K, 1e4, 20)
    heads = {"num_heads": 2, "num_kv_heads": 1}
    with pytest.raises(UnsupportedError, match=message):
        attention.attention(
            qkv, cache, cache.clone(), torch.tensor(0, dtype=torch.int32), table.cos, table.sin, **heads
        )
