"""Soloist: an LLM inference engine for concurrency 1."""

__version__ = "0.1.0"
