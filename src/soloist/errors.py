"""Every exception a caller can cause. Owns the error tree and the exit codes; knows nothing of HTTP."""


class SoloistError(Exception):
    """Something a caller can mend; the message says what was given, what is allowed and what to do."""

    exit_code = 1


class UsageError(SoloistError, ValueError):
    """An option, parameter or request field is wrong."""

    exit_code = 2


class ContextLengthError(UsageError):
    """The prompt, or the prompt with its answer, is longer than the context."""


class ModelNotFoundError(UsageError):
    """A model name or path leads nowhere."""


class UnsupportedError(UsageError):
    """A model, key, format or combination that Soloist refuses by name."""


class CheckpointError(SoloistError):
    """A checkpoint's files are incomplete, damaged or contradict its config."""


class DoesNotFitError(SoloistError):
    """The model, its state or its context does not fit into memory."""

    exit_code = 3


class NumericsError(SoloistError):
    """A forward pass produced values that are not finite."""


class RankLostError(SoloistError):
    """One of the processes that share a model ended, was stopped, or did not come to an exchange in time."""
