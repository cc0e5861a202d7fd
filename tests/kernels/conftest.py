"""Triton's interpreter without work that repeats what was done before: kernel tests take half the time."""

import dataclasses
from collections.abc import Iterator

import pytest

from soloist.kernels.launch import HAS_TRITON, IS_INTERPRETED


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter() -> Iterator[None]:
    if not (HAS_TRITON and IS_INTERPRETED):
        yield
        return
    from triton.runtime import interpreter

    call, options = interpreter.InterpretedFunction.__call__, interpreter.interpreter_builder.options
    has_patched = set()

    # A launch makes the language interpreted, and so does every call of a function within it, over and over.
    def call_patched(self, *args, **kwargs):
        if self.fn in has_patched:
            return self.rewrite()(*args, **kwargs)
        has_patched.add(self.fn)
        return call(self, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call_patched
    # Every integer sum would be computed twice, to find overflows that shapes of tests cannot have.
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    yield
    interpreter.InterpretedFunction.__call__, interpreter.interpreter_builder.options = call, options
