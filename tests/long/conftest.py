"""The services of `align up`, as the tests of deployments have them."""

from tests.deployments.conftest import database, postgres, services

__all__ = ["database", "postgres", "services"]
