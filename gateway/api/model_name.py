"""The model that a request names: the one that is served, or none."""

from gateway.config import GatewayConfig
from gateway.errors import ModelNotFound

MAX_ECHO = 100
"""Characters of an unknown name that are told back."""


def check_model(config: GatewayConfig, name: str | None) -> None:
    """Raise ModelNotFound when a request names a model that is not served here."""
    if name is not None and name not in (config.model_name, config.model):
        raise ModelNotFound(
            f"the model {name[:MAX_ECHO]!r} is not served here; {config.model_name!r} is", param="model"
        )
