"""Tests that prediction does not change the training mode of any module of a network."""

import pytest
import torch
from torch import nn

from regard.tasks.inference import evaluating


@pytest.mark.parametrize("fails", [False, True], ids=["", "raises"])
def test_each_module_gets_its_own_mode_back(fails: bool) -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).train()
    network[1].eval()  # the batch norm is frozen: it stays in evaluation mode during training
    with pytest.raises(ZeroDivisionError) if fails else torch.enable_grad(), evaluating(network):
        assert not any(module.training for module in network.modules())
        assert not torch.is_grad_enabled()
        assert 1 // (0 if fails else 1)
    assert [module.training for module in network.modules()] == [True, True, False, True]
