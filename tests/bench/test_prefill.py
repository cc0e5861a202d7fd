"""A prompt's trace, made by hand: kinds by name, what only exchanges, what is idle."""

import pytest
import torch

from soloist.bench import prefill
from soloist.bench.prefill import behind_stamp, kind_of, measure_prompt, summarise, union_ns
from soloist.models import load_model
from soloist.runtime.runner import ModelRunner
from tests.miniature import miniature_config


def test_kernels_have_a_kind():
    assert kind_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)") == "exchange"
    assert kind_of("grouped_gate_up_kernel") == "experts"
    assert kind_of("scan_kernel") == "KDA"
    assert kind_of("void flash_fwd_splitkv_kernel<...>") == "attention"
    assert kind_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN") == "matrix products"
    assert kind_of("void at::native::vectorized_elementwise_kernel") == "other"


def test_time_in_which_several_run_counts_once():
    assert union_ns([(10, 5, "a"), (0, 4, "b"), (12, 1, "c"), (14, 6, "d")]) == 4 + 10
    assert union_ns([]) == 0


def test_a_prompt_is_what_runs_what_only_exchanges_and_the_rest():
    ms = 1_000_000
    events = [
        (0, 2 * ms, "nvjet_a"),
        # Half of it beside a product.
        (1 * ms, 2 * ms, "ncclDevKernel"),
        (5 * ms, 3 * ms, "grouped_down_kernel"),
        (8 * ms, 1 * ms, "grouped_down_kernel"),
    ]
    figures = summarise(events, 9.5, (9.0, 11.0), 4.0)
    assert figures.kernel_ms == {"experts": 4.0, "matrix products": 2.0, "exchange": 2.0}
    assert figures.exposed_exchange_ms == 1.0 and figures.launches == 4
    # 7 of the 9.5 that passes take without a trace.
    assert figures.idle_ms == 2.5
    assert figures.longest[0] == ("grouped_down_kernel", 2, 4.0)


def test_what_brings_ranks_together_is_no_part_of_a_prompt():
    ms = 1_000_000
    barrier, stamp = (0, 80 * ms, "ncclDevKernel_AllReduce"), (81 * ms, 1000, "stamp_kernel")
    prompt = [(82 * ms, 2 * ms, "ncclDevKernel_AllReduce"), (84 * ms, 1 * ms, "scan_kernel")]
    assert behind_stamp([prompt[1], barrier, stamp, prompt[0]]) == [prompt[1], prompt[0]]
    figures = summarise(behind_stamp([barrier, stamp, *prompt]), 4.0, (4.0, 4.0), 1.0)
    assert figures.kernel_ms == {"exchange": 2.0, "KDA": 1.0} and figures.launches == 2
    assert figures.exposed_exchange_ms == 2.0 and figures.idle_ms == 1.0


def test_every_pass_is_stamped_once_ranks_have_met_and_before_it_reads(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(prefill, "stamp", lambda times, num_steps, *, is_end: said.append("stamp"))
    events = [(0, 5, "nccl"), (5, 1, "stamp_kernel"), (6, 4, "x")]
    monkeypatch.setattr(prefill, "trace_gpu", lambda run: run() or events)
    model = load_model(miniature_config("llama"), dtype=torch.float32, weights="random")
    runner = ModelRunner(model, max_context_len=40)
    prompt = torch.arange(30)
    read = lambda *_: said.append("read")
    figures = measure_prompt(runner, prompt, on_chunk=read, meet=lambda: said.append("meet"), repeats=2)
    assert said == ["meet", "stamp", "read"] * 4 and figures.launches == 1
