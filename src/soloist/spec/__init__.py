"""Speculation: which drafters there are. `drafter` says what one is, `verify` what becomes of its proposals."""

from collections.abc import Callable

from soloist.errors import UnsupportedError
from soloist.spec.drafter import Drafter, NoDrafter
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
    "ngram": _make_prompt_lookup,
}


def make_drafter(name: str, setup: DrafterSetup) -> Drafter:
    """Make a drafter.

    Args:
        name: of `DRAFTERS`; anything else is what the user called the checkpoint at `setup.draft_path`.
        setup: the target and the wishes around it.

    Raises:
        UnsupportedError: there is no drafter of this name, or what is at the path cannot draft for the target.
    """
    if setup.draft_path is None:
        if name not in DRAFTERS:
            raise UnsupportedError(
                f"there is no drafter {name!r}; known: {', '.join(sorted(DRAFTERS))}, or the path of a draft"
            )
        return DRAFTERS[name](setup)
    raise UnsupportedError(f"{name}: no drafter reads this checkpoint")
