"""What all tests share: an environment with none of a service's variables, and the path of the repository."""

from __future__ import annotations

import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

# A test under a service (or after another test) must not take that service's job for its own.
SERVICE_VARIABLES = (
    'TF_CONFIG',
    'CLUSTER_SPEC',
    'TPU_CONFIG',
    'CLOUD_ML_HP_METRIC_FILE',
    'CLOUD_ML_HP_METRIC_TAG',
    'CLOUD_ML_JOB',
    'CLOUD_ML_JOB_ID',
    'CLOUD_ML_TRIAL_ID',
    'AIP_MODEL_DIR',
    'AIP_CHECKPOINT_DIR',
    'AIP_TENSORBOARD_LOG_DIR',
)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are no name: those of a GZIP file hold the time, and the processes of pytest-xdist must name a test alike."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SERVICE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def repository() -> pathlib.Path:
    """The folder of the repository."""
    return REPOSITORY
