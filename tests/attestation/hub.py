"""A Hub on loopback for tests of this process: ``huggingface_hub`` reads its environment once, when it is imported."""

from __future__ import annotations

import huggingface_hub.constants
import pytest

from tests.servers.hub import TOKEN, HubServer

WHERE = "{repo_id}/resolve/{revision}/{filename}"


def use(server: HubServer, patch: pytest.MonkeyPatch, token: str = TOKEN) -> None:
    """Let the client of this process talk to the server."""
    for name, value in server.environment(token).items():
        patch.setenv(name, value)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.url}/{WHERE}")
    patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
