"""A run under `align up` whose flow or worker ends saves its work and resumes by itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.endings import check_that_it_goes_on
from tests.deployments.up import Services

ON_AGAIN_SECONDS = 60.0
"""On a machine that does nothing else, as long as these tests have it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("end", ["SIGKILL of the flow", "SIGTERM of the flow", "SIGTERM of the worker"])
def test_a_terminated_run_resumes_by_itself_and_loses_no_step(services: Services, end: str, measured: Any) -> None:
    marked, again = check_that_it_goes_on(services, end)
    measured(f"marked after {marked:.1f} s, training again {again:.1f} s later")
    assert again < ON_AGAIN_SECONDS
