"""Settings and models shared by the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import small_models
import twin
from convert import load_model
from golden_data import CHECKPOINT, golden
from model import Transformer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes")
    config.addinivalue_line("markers", "manual: run only when asked for by name or -m manual")
    torch.set_num_threads(1)  # the matrices are tiny: a second thread costs more than it brings


@pytest.fixture(scope="session")
def tiny() -> Transformer:
    """The golden checkpoint in exact mode, without its draft head. Shared: tests that change weights load their own."""
    return load_model(CHECKPOINT, exact=True, device="cpu")


@pytest.fixture(scope="session")
def golden_text() -> dict[str, torch.Tensor]:
    return golden("text")


@pytest.fixture(scope="session")
def tiny_twin() -> twin.Checkpoint:
    return twin.load_checkpoint(CHECKPOINT)


@pytest.fixture(scope="session")
def wide_window(tmp_path_factory: pytest.TempPathFactory) -> small_models.Small:
    """Window 128, ratios 2 and 1, pool and top-k pruning, an Engram layer; 300 tokens."""
    return small_models.make(small_models.WIDE_WINDOW, tmp_path_factory.mktemp("wide_window"), seed=3, tokens=300)


@pytest.fixture(scope="session")
def thirds(tmp_path_factory: pytest.TempPathFactory) -> small_models.Small:
    """Ratio 3, window 9, three residual streams, no Engram; 130 tokens."""
    return small_models.make(small_models.THIRDS, tmp_path_factory.mktemp("thirds"), seed=5, tokens=130)
