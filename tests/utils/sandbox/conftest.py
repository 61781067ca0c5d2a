"""The sandbox under test."""

import pytest

from tests.utils.sandbox.needs import require_namespaces
from verl.utils.sandbox import Limits, Sandbox


@pytest.fixture
def sandbox() -> Sandbox:
    require_namespaces()
    return Sandbox(Limits(timeout_seconds=60), packages=())
