"""What every test may rely on: a CPU-only, quiet environment, one torch thread, fixed seeds."""

import os
import random
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Before torch, DeepSpeed or Ray is imported; subprocesses and Ray workers inherit it.
os.environ.update(
    DS_ACCELERATOR="cpu",
    DS_BUILD_OPS="0",
    HF_HUB_OFFLINE="1",
    MPLBACKEND="Agg",
    OMP_NUM_THREADS="1",
    PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_prestart_worker_first_driver="0",
    TOKENIZERS_PARALLELISM="false",
)

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Every test starts from the same global random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The repository's root, from which configs, docs and commands are named."""
    return ROOT
