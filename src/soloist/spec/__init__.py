"""Speculation: which drafters there are. `drafter` says what one is, `verify` what becomes of its proposals."""

from collections.abc import Callable

from soloist.errors import UnsupportedError
from soloist.models.causal_lm import CausalLM
from soloist.spec.drafter import Drafter, NoDrafter

# Name -> what makes the drafter, given the target and the context it shall hold.
DRAFTERS: dict[str, Callable[[CausalLM, int], Drafter]] = {"off": lambda target, max_context_len: NoDrafter()}


def make_drafter(name: str, target: CausalLM, max_context_len: int) -> Drafter:
    """Make a drafter by name.

    Args:
        name: of `DRAFTERS`.
        target: the model it drafts for.
        max_context_len: most tokens of a request.

    Raises:
        UnsupportedError: there is no drafter of this name.
    """
    if name not in DRAFTERS:
        raise UnsupportedError(f"there is no drafter {name!r}; known: {', '.join(sorted(DRAFTERS))}")
    return DRAFTERS[name](target, max_context_len)
