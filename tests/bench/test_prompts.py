"""A prompt's trace, made by hand: kinds by name, what only exchanges, what is idle."""

from soloist.bench.prompts import kind_of, summarise, union_ns


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
