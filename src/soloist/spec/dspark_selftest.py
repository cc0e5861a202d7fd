"""Finding out whether a draft is read as it was trained, on a text that the target has written.

A draft that is read with target layers one off, with a block one position off, or in the other slot convention, makes
proposals as ever, and none is accepted. So the draft is run from many places of a known text in every such reading, and
the one that agrees with the text is compared with the one that the checkpoint declares.

Tokens before a slot are the text's own, never the draft's (teacher forcing), so slots are judged one by one.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from soloist.errors import UsageError
from soloist.kernels.rotary import RotaryTable
from soloist.models.cache import StepKind
from soloist.models.causal_lm import CausalLM, HiddenCapture
from soloist.spec.dspark_model import DraftContext, DSparkModel

# Tokens that the target reads at a time.
CHUNK_TOKENS = 128
# Readings whose agreement differs by less are as good; a misreading costs most of it.
EQUAL_AGREEMENT = 0.05
# Below this no reading is right.
MIN_AGREEMENT = 0.2


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a draft, relative to its descriptor."""

    slot0_predicts: bool
    # Added to every target layer.
    layer_offset: int = 0
    # Added to the positions of the block.
    position_offset: int = 0

    def num_changes(self, declared: "Reading") -> tuple[int, ...]:
        """Count what differs from the declared reading; of equals, what a checkpoint can say wrongly comes first."""
        differs = (
            self.position_offset != declared.position_offset,
            self.layer_offset != declared.layer_offset,
            self.slot0_predicts != declared.slot0_predicts,
        )
        return (sum(differs), *differs)


@dataclass(frozen=True, kw_only=True)
class DraftAgreement:
    """How often the likeliest draft is the text's token, by reading."""

    declared: Reading
    # By reading, for each slot that predicts, in 0..1.
    by_slot: dict[Reading, tuple[float, ...]]
    # Places of the text that the draft was run from.
    num_anchors: int
    target_layer_ids: tuple[int, ...]

    def mean(self, reading: Reading) -> float:
        """Mean over the slots."""
        return sum(self.by_slot[reading]) / len(self.by_slot[reading])

    @property
    def best(self) -> Reading:
        """The reading that agrees most; of about equal ones the one nearest to the declared."""
        highest = max(map(self.mean, self.by_slot))
        good = [reading for reading in self.by_slot if self.mean(reading) > highest - EQUAL_AGREEMENT]
        return min(good, key=lambda reading: reading.num_changes(self.declared))

    @property
    def fault(self) -> str | None:
        """What is wrong with the declared reading, in words. None: nothing."""
        best, declared = self.best, self.declared
        if self.mean(best) < MIN_AGREEMENT:
            return (
                f"no reading of the draft agrees with the text (the best with {self.mean(best):.2f}): it was hardly"
                " trained, or for another target or another kind of text, its mask token is wrong, or its weights are"
                " damaged"
            )
        found = []
        if best.layer_offset != declared.layer_offset:
            layers = [layer + best.layer_offset for layer in self.target_layer_ids]
            found.append(f"target_layer_ids ought to be {layers}, not {list(self.target_layer_ids)}")
        if best.position_offset != declared.position_offset:
            side = "later" if best.position_offset > 0 else "earlier"
            found.append(f"the block ought to stand one position {side}")
        if best.slot0_predicts != declared.slot0_predicts:
            word = "ought to predict" if best.slot0_predicts else "ought not to predict"
            found.append(f"slot 0 {word} (sample_from_anchor)")
        if not found:
            return None
        return (
            f"{' and '.join(found)}: the draft then agrees with {self.mean(best):.2f} of the text, as declared with"
            f" {self.mean(declared):.2f} of it"
        )


def measure_agreement(
    model: DSparkModel, target: CausalLM, token_ids: Sequence[int], *, num_prompt: int, num_anchors: int = 200
) -> DraftAgreement:
    """Run a draft from many places of a text, in every reading.

    Reads results on the host: for loading and checking, never within a step.

    Args:
        model: the draft.
        target: the model it drafts for.
        token_ids: a text whose tokens from `num_prompt` on are the target's own, greedy.
        num_prompt: at least 1.
        num_anchors: most places to draft from, spread over the answer.

    Raises:
        UsageError: the text is too short for a block, or too long for the draft's context.
    """
    config = model.config
    B = config.block_size
    limit = model.max_positions - B
    if not num_prompt + B < len(token_ids) <= limit:
        raise UsageError(
            f"a text of {len(token_ids)} tokens, {num_prompt} of them prompt; this draft is checked on an answer of"
            f" more than {B} tokens and a text of at most {limit}"
        )
    ids = torch.tensor(token_ids, device=model.device)  # (n,)
    places = torch.linspace(num_prompt, len(token_ids) - 1 - B, num_anchors).long().unique().tolist()
    declared = Reading(slot0_predicts=config.slot0_predicts)
    counts: dict[Reading, torch.Tensor] = {}
    for layer_offset, captured in _capture(model, target, ids).items():
        context = model.make_context()
        model.read_context(captured, context, torch.zeros((), dtype=torch.int32, device=model.device))
        # Blocks leave their rows in the context, so those that need the later rows come first.
        for anchor, position_offset in itertools.product(reversed(places), (-1, 0, 1)):
            hits = _run_anchor(model, context, ids[anchor : anchor + B + 1], anchor, position_offset)
            for slot0_predicts, is_hit in hits.items():
                reading = replace(
                    declared,
                    slot0_predicts=slot0_predicts,
                    layer_offset=layer_offset,
                    position_offset=position_offset,
                )
                counts[reading] = counts.get(reading, torch.zeros_like(is_hit, dtype=torch.int64)) + is_hit
    return DraftAgreement(
        declared=declared,
        by_slot={reading: tuple((count / len(places)).tolist()) for reading, count in counts.items()},
        num_anchors=len(places),
        target_layer_ids=config.target_layer_ids,
    )


def _capture(model: DSparkModel, target: CausalLM, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Read a text (n,) with the target; give hidden states (n, layers, D) by what is added to the layers."""
    own = model.config.target_layer_ids
    depth = target.config.num_hidden_layers
    wanted = {
        offset: shifted
        for offset in (-1, 0, 1)
        if min(shifted := [layer + offset for layer in own]) >= -1 and max(shifted) < depth
    }
    layers = tuple(sorted({layer for shifted in wanted.values() for layer in shifted}))
    shape = (CHUNK_TOKENS, len(layers), target.config.hidden_size)
    capture = HiddenCapture(layers=layers, hidden=torch.zeros(shape, dtype=target.dtype, device=target.device))
    cache = target.make_cache(ids.shape[0])
    chunks = []
    for chunk in ids.split(CHUNK_TOKENS):
        target.forward(chunk, cache, StepKind.PREFILL, capture=capture)
        cache.commit(chunk.shape[0], StepKind.PREFILL)
        chunks.append(capture.hidden[: chunk.shape[0]].clone())
    hidden = torch.cat(chunks)  # (n, layers, D)
    return {offset: hidden[:, [layers.index(layer) for layer in shifted]] for offset, shifted in wanted.items()}


def _run_anchor(
    model: DSparkModel, context: DraftContext, text: torch.Tensor, anchor: int, position_offset: int
) -> dict[bool, torch.Tensor]:
    """Draft behind one place of a text, and compare in both slot conventions.

    Args:
        model: the draft.
        context: of the text before the anchor.
        text: (B+1,) the anchor and the tokens behind it.
        anchor: its position.
        position_offset: added to the block's positions.

    Returns:
        Whether each slot that predicts is right, by whether slot 0 predicts.
    """
    B = model.config.block_size
    block_ids = torch.full((B,), model.config.mask_token_id, device=model.device)
    block_ids[0] = text[0]
    context_len = torch.tensor(anchor, dtype=torch.int32, device=model.device)
    hidden = model.run_block(block_ids, context, context_len, _shift(model.rotary, position_offset))  # (B, D)
    logits = model.compute_logits(hidden)  # (B, N)
    hits = {}
    for slot0_predicts in (True, False):
        first = 0 if slot0_predicts else 1
        # Entry i is the text before the token that slot first + i predicts.
        before, wanted = text[: B - first], text[1 : B - first + 1]
        biased = logits[first:]
        if model.markov is not None:
            biased = biased + _biases(model, before, hidden[first:])
        hits[slot0_predicts] = model.over_target_ids(biased).argmax(-1) == wanted
    return hits


def _biases(model: DSparkModel, before: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run the Markov head over a block (n, D) whose tokens before each slot are known: (n, N)."""
    assert model.markov is not None
    state, biases = model.markov.start, []
    for row in range(before.shape[0]):
        embedded = model.markov.embed(before[row : row + 1])
        bias, state = model.markov.step(embedded, hidden[row : row + 1], state)
        biases.append(bias)
    return torch.cat(biases)


def _shift(rotary: RotaryTable, offset: int) -> RotaryTable | None:
    """Give a table whose row p has the angles of position p + offset; None: the model's own will do."""
    if offset == 0:
        return None
    shifted = [table.roll(-offset, dims=0) for table in (rotary.cos, rotary.sin)]
    return RotaryTable(cos=shifted[0], sin=shifted[1])
