"""Soloist: an LLM inference engine for concurrency 1.

The names below are imported when they are first used, so that what needs no model does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soloist.answer import Completion, Delta, Stream
    from soloist.errors import SoloistError
    from soloist.llm import LLM
    from soloist.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Delta", "SamplingParams", "SoloistError", "Stream", "__version__"]

_HOMES = {
    "LLM": "soloist.llm",
    "Completion": "soloist.answer",
    "Delta": "soloist.answer",
    "SamplingParams": "soloist.sampling_params",
    "SoloistError": "soloist.errors",
    "Stream": "soloist.answer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'soloist' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
