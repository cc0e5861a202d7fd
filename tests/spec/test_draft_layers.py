"""Drafts whose layers every rank holds whole: what is held, read and exchanged beside the form that ranks share."""

from pathlib import Path

import pytest
import torch

from soloist.errors import UnsupportedError
from soloist.hub import built_in_config
from soloist.kernels import allreduce
from soloist.kernels.allreduce import ALONE, TensorParallel
from soloist.models import load_model, loader
from soloist.models.bailing_moe_v3 import BailingMoeV3Config, BailingMoeV3ForCausalLM, BailingMoeV3MTP
from soloist.models.causal_lm import CausalLM
from soloist.models.footprint import CountingSource
from soloist.models.weights import RecordingSource
from soloist.runtime.buffers import SamplingPlan, StepBuffers
from soloist.sampling_params import SamplingParams
from soloist.spec import dspark
from soloist.spec.drafter import Drafter
from soloist.spec.dspark import make_random_dspark
from soloist.spec.dspark_checkpoint import load_dspark
from soloist.spec.dspark_config import random_config
from soloist.spec.dspark_model import DSparkModel
from soloist.spec.mtp import load_mtp
from soloist.spec.setup import DrafterSetup, DraftLayers
from tests.rank_program import OVERRIDES
from tests.spec.drafters import write_small
from tests.spec.dspark_drafts import deepspec_json, draft_for, write_draft

PAIR = [TensorParallel(rank=rank, size=2) for rank in range(2)]
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def flash() -> BailingMoeV3Config:
    return BailingMoeV3Config.from_dict(built_in_config("ling-3.0-flash"))


def load_target(folder: Path, family: str, group: TensorParallel) -> CausalLM:
    path = write_small(folder / family, family, **OVERRIDES[family])
    return load_model(path, dtype=torch.float32, group=group)


def setup_for(target: CausalLM, form: DraftLayers = "sharded", path: Path | None = None) -> DrafterSetup:
    return DrafterSetup(
        target=target,
        draft_path=path,
        max_context_len=40,
        num_tokens=target.config.vocab_size,
        max_width=1 + NUM_DRAFTS,
        draft_layers=form,
    )


def on_meta(config: BailingMoeV3Config, form: DraftLayers) -> DrafterSetup:
    return setup_for(BailingMoeV3ForCausalLM(config, RecordingSource(group=PAIR[0])), form)


@pytest.mark.parametrize(("form", "share"), [("sharded", 0.5), ("replicated", 1.0)])
def test_a_round_of_dspark_reads_its_layers_whole_and_the_vocabulary_by_halves(flash, form, share: float):
    setup = on_meta(flash, form)
    source = CountingSource(RecordingSource(group=setup.layer_group))
    model = DSparkModel(random_config(flash), source, 1, vocabulary_group=setup.target.group)
    # Layers with the maps of the context once more; what is whole in both forms; head and eight times W2. MB.
    want = share * (891 + 210) + 66 + (805 + 80.5 * 8) / 2
    assert model.read_bytes(0, 8) / 1e6 == pytest.approx(want, rel=1e-3)
    assert model.read_bytes(8192, 8) - model.read_bytes(0, 8) == share * 8192 * 81_920
    assert source.group is setup.layer_group and source.source.group is setup.layer_group


@pytest.mark.parametrize(("form", "share"), [("sharded", 0.5), ("replicated", 1.0)])
def test_the_footprint_of_an_mtp_layer_is_of_what_a_rank_holds(flash, form, share: float):
    setup = on_meta(flash, form)
    counted = CountingSource(RecordingSource(group=setup.layer_group))
    mtp = BailingMoeV3MTP(setup.target, counted)
    footprint = counted.footprint(mtp.make_cache(1), flash, num_layers=1)
    # 512 experts of three maps.
    (experts,) = (part for part in footprint.parts if part.name == "routed_experts")
    assert experts.weight_bytes == share * 512 * 3 * 768 * 2560 * 2


def count_exchanges(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Give the list that every exchange of a pretended pair of equal ranks is put into."""
    exchanged: list[torch.Tensor] = []

    def gather(x: torch.Tensor, group: TensorParallel) -> torch.Tensor:
        exchanged.append(x)
        return torch.stack([x] * group.size)

    monkeypatch.setattr(allreduce, "_gather", gather)
    return exchanged


def propose(drafter: Drafter, target: CausalLM) -> None:
    buffers = StepBuffers.allocate(max_width=1 + NUM_DRAFTS, num_tokens=target.config.vocab_size, has_draft_probs=True)
    drafter.begin(torch.tensor([1, 2]), SamplingPlan.of(SamplingParams()))
    buffers.input_ids[:1] = 3
    buffers.width.fill_(1 + NUM_DRAFTS)
    drafter.propose(buffers, torch.tensor(1, dtype=torch.int32))


@pytest.mark.parametrize(("form", "in_a_layer"), [("sharded", 2), ("replicated", 0)])
def test_replicated_layers_exchange_nothing(tmp_path: Path, monkeypatch, form: DraftLayers, in_a_layer: int):
    target = load_target(tmp_path, "bailing_moe_v3", PAIR[0])
    exchanged = count_exchanges(monkeypatch)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "target_layer_ids": (0,), "markov_rank": 6}
    propose(make_random_dspark(setup_for(target, form), random_config(target.config, block_size=4, **shape)), target)
    # The block's embedding, and each draft's token.
    assert len(exchanged) == 1 + 2 * in_a_layer + NUM_DRAFTS
    exchanged.clear()
    propose(load_mtp(setup_for(target, form)), target)
    # The first draft's token; of each other its embedding and token.
    assert len(exchanged) == 1 + (NUM_DRAFTS - 1) * (2 + in_a_layer)


def test_heads_need_to_divide_only_among_ranks_that_share_them(tmp_path: Path):
    target = load_target(tmp_path, "qwen3", PAIR[1])
    config = random_config(target.config, num_attention_heads=3, target_layer_ids=(0,), num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="the draft has heads or widths of 3"):
        make_random_dspark(setup_for(target), config)
    drafter = make_random_dspark(setup_for(target, "replicated"), config)
    assert drafter.buffers.context.k.shape[1] == 3


def test_a_checkpoint_gives_every_rank_all_layers_and_its_own_tokens(tmp_path: Path, monkeypatch):
    asked_bytes: list[float] = []
    for module in (dspark, loader):
        monkeypatch.setattr(module, "check_fits", lambda num_bytes, *_: asked_bytes.append(num_bytes))
    targets = [load_target(tmp_path, "llama", group) for group in PAIR]
    N, D = targets[0].config.vocab_size, targets[0].config.hidden_size
    draft = draft_for(targets[0])
    tables = {name: torch.randn(N, D) for name in ("embed_tokens.weight", "lm_head.weight")}
    path = write_draft(tmp_path / "draft", deepspec_json(draft), draft.draw(11) | tables)
    whole = load_dspark(setup_for(load_target(tmp_path, "llama", ALONE), path=path))
    asked_bytes.clear()
    first, second = (load_dspark(setup_for(target, "replicated", path)) for target in targets)
    for held in ("embed_tokens", "lm_head"):
        found = torch.cat([getattr(drafter.model, held) for drafter in (first, second)])
        assert found.shape[0] == N + N % 2 and torch.equal(found[:N], tables[f"{held}.weight"])
    found = torch.cat([drafter.model.markov.w2 for drafter in (first, second)])
    assert torch.equal(found[:N], whole.model.markov.w2)
    context = whole.buffers.context.k
    assert first.buffers.context.k.shape == context.shape
    for drafter in (first, second):
        assert torch.equal(drafter.model.context_kv, whole.model.context_kv)
        for layer, want in zip(drafter.model.layers, whole.model.layers, strict=True):
            assert torch.equal(layer.attention.o_proj, want.attention.o_proj)
            assert torch.equal(layer.feed_forward.gate_up, want.feed_forward.gate_up)
    # Of each rank its context, then its weights: all of a draft of one rank, but for half of what goes by token.
    assert asked_bytes[0] == asked_bytes[2] == 2 * context.numel() * 4
    halves = 4 * (N // 2) * (2 * D + draft.rank)
    assert asked_bytes[1] == asked_bytes[3] == sum(4 * x.numel() for x in (draft.draw(11) | tables).values()) - halves
