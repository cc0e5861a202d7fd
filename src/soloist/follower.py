"""What a rank other than rank 0 runs: it loads the model as rank 0 does, then runs whatever request rank 0 runs."""

import contextlib
from typing import Any, NoReturn

import torch

from soloist.engine import Engine
from soloist.errors import NumericsError, SoloistError
from soloist.loading import load_rank
from soloist.prefix import PrefixStore
from soloist.runtime.comm import Follower


class FollowedConstraint:
    """Stands for a constraint that rank 0 decides; what may follow comes from there."""

    def num_legal(self, draft_tokens: list[int]) -> int:
        raise AssertionError("rank 0 decides what is legal")

    def allowed(self, draft_tokens: list[int]) -> torch.Tensor:
        raise AssertionError("rank 0 decides what is allowed")

    def advance(self, token_ids: list[int]) -> None:
        """Follow nothing."""


def run_request(engine: Engine, request: dict[str, Any]) -> None:
    """Run a request of rank 0, whose answer nobody reads here."""
    if request["prefix_bytes"] is not None and engine.prefixes is None:
        device_bytes, host_bytes = request["prefix_bytes"]
        engine.prefixes = PrefixStore(device_bytes=device_bytes, host_bytes=host_bytes)
    engine.eos_token_ids = request["eos_token_ids"]
    generation = engine.generate(
        request["prompt_ids"],
        request["params"],
        turn_ends=request["turn_ends"],
        prompt_logprobs=request["prompt_logprobs"],
        constraint=FollowedConstraint() if request["has_constraint"] else None,
    )
    generation.seed = request["seed"]
    # Rank 0 raises it as well.
    with contextlib.suppress(NumericsError):
        for _ in generation:
            pass


def follow(ranks: Follower) -> NoReturn:
    """Load the model, then run every request of rank 0."""
    engine = load_rank(ranks.arguments, ranks, ranks.device).engine
    while True:
        run_request(engine, ranks.next_request())


def main() -> None:
    """Be a rank until rank 0 ends."""
    ranks = Follower()
    try:
        follow(ranks)
    except SoloistError as error:
        # Rank 0 raises it.
        ranks.say(error)
    except RuntimeError:
        # An exchange breaks off where rank 0 has ended, and that is no fault.
        ranks.wait_for_end()
        raise
