"""Shared settings: no hub, no tracker, and the tables that the law tests use."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("WANDB_MODE", "disabled")

import pytest

from csd_policy.testing import TableModel, random_table


@pytest.fixture
def table() -> TableModel:
    """Four codes on a 1x3 grid, with its own unconditional branch."""
    return TableModel(random_table(0), random_table(1))
