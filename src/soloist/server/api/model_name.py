"""The model's name in requests: any name is served, unless the server is strict; none triggers a download."""

from soloist.server.failures import ModelNameError
from soloist.server.service import Service


def check_model(service: Service, name: str | None) -> None:
    """Refuse another model's name where the server is strict.

    Raises:
        ModelNameError: the model is not served.
    """
    settings = service.settings
    if settings.is_strict and name not in (None, settings.model_name):
        raise ModelNameError(f"the model {name!r} is not served here; this server has {settings.model_name!r}")
