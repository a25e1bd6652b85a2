"""Runs the conformance suite once per registered backend: `pytest tests/backends --device npu` for one of them.

A backend this machine has no device or package for is skipped, unless it was asked for by name.
"""

from __future__ import annotations

import pytest
import torch

from ssd_ascend.backends.base import Backend
from ssd_ascend.backends.registry import BACKENDS, load_backend
from ssd_ascend.errors import ConfigError


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        only = metafunc.config.getoption("--device", default=None)
        metafunc.parametrize("backend", [only] if only else BACKENDS.names(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each registered backend in turn."""
    try:
        found = load_backend(request.param)
        found.device(0)
    except ConfigError as error:
        if request.config.getoption("--device", default=None):
            raise
        pytest.skip(f"no {request.param} here: {error}")
    return found


@pytest.fixture(scope="session")
def device(backend: Backend) -> torch.device:
    """The backend's first device."""
    return backend.device(0)
