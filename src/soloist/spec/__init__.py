"""Speculation: which drafters there are. `drafter` says what one is, `verify` what becomes of its proposals."""

from collections.abc import Callable
from pathlib import Path

from soloist.errors import UnsupportedError, UsageError
from soloist.spec.draft_model import load_draft_model
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.dspark import make_random_dspark
from soloist.spec.dspark_checkpoint import is_dspark, load_dspark
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import DEFAULT_DRAFTS as NGRAM_DRAFTS
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup

MakeDrafter = Callable[[DrafterSetup], Drafter]


def _make_prompt_lookup(setup: DrafterSetup) -> Drafter:
    if setup.weights_dtype is not None:
        raise UsageError("prompt lookup has no weights to hold otherwise: leave draft_weights_dtype out")
    return PromptLookup(
        max_context_len=setup.max_context_len,
        max_drafts=setup.max_drafts(NGRAM_DRAFTS),
        device=setup.target.device,
    )


def _make_dspark_for_speed(setup: DrafterSetup) -> Drafter:
    if setup.target_path is not None:
        raise UnsupportedError(
            "a dspark draft without a checkpoint has random weights, to measure targets with random weights: give the"
            " path of a draft that was trained for this model"
        )
    return make_random_dspark(setup)


# Drafters without a checkpoint of their own, by name.
DRAFTERS: dict[str, MakeDrafter] = {
    "dspark": _make_dspark_for_speed,
    "off": lambda setup: NoDrafter(),
    "mtp": load_mtp,
    "ngram": _make_prompt_lookup,
}
# Drafts with a checkpoint: what tells them, the most particular first, and what makes the drafter.
CHECKPOINTS: tuple[tuple[Callable[[Path], bool], MakeDrafter], ...] = (
    (is_dspark, load_dspark),
    (lambda path: True, load_draft_model),
)


def make_drafter(name: str, setup: DrafterSetup) -> Drafter:
    """Make a drafter.

    Args:
        name: of `DRAFTERS`; or what to call the checkpoint at `setup.draft_path`.
        setup: the target and the wishes around it.

    Raises:
        UnsupportedError: there is no drafter of this name, or what is at the path cannot draft for the target.
        CheckpointError: a checkpoint is incomplete or damaged.
        DoesNotFitError: the draft is larger than the free memory.
    """
    if setup.draft_path is None:
        if name not in DRAFTERS:
            raise UnsupportedError(
                f"there is no drafter {name!r}; known: {', '.join(sorted(DRAFTERS))}, or the path of a draft"
            )
        return DRAFTERS[name](setup)
    make = next(make for tells, make in CHECKPOINTS if tells(setup.draft_path))
    drafter = make(setup)
    drafter.name = " ".join([drafter.name, name, *([setup.weights_dtype] if setup.weights_dtype else [])])
    return drafter
