"""Speculation: which drafters there are. `drafter` says what one is, `verify` what becomes of its proposals."""

from collections.abc import Callable
from pathlib import Path

from soloist.errors import UnsupportedError
from soloist.spec.draft_model import load_draft_model
from soloist.spec.drafter import Drafter, NoDrafter
from soloist.spec.mtp import load_mtp
from soloist.spec.ngram import DEFAULT_DRAFTS as NGRAM_DRAFTS
from soloist.spec.ngram import PromptLookup
from soloist.spec.setup import DrafterSetup

MakeDrafter = Callable[[DrafterSetup], Drafter]


def _make_prompt_lookup(setup: DrafterSetup) -> Drafter:
    return PromptLookup(
        max_context_len=setup.max_context_len,
        max_drafts=setup.max_drafts(NGRAM_DRAFTS),
        device=setup.target.device,
    )


# Drafters without a checkpoint of their own, by name.
DRAFTERS: dict[str, MakeDrafter] = {
    "off": lambda setup: NoDrafter(),
    "mtp": load_mtp,
    "ngram": _make_prompt_lookup,
}
# Drafts with a checkpoint: what tells them, the most particular first, and what makes the drafter.
CHECKPOINTS: tuple[tuple[Callable[[Path], bool], MakeDrafter], ...] = ((lambda path: True, load_draft_model),)


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
    drafter.name = f"{drafter.name} {name}"
    return drafter
