"""Which modules within a module are linear maps: adapters in place of what they hold."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hdi_callback.attention.layer.projections import features
from hdi_callback.attention.trace.maps import is_like_a_map, linear_maps
from tests.attention.test_projections import Linear


def test_linear_maps_are_listed_in_order_with_an_adapter_in_place_of_its_base_layer():
    module = nn.ModuleDict(
        {
            "q": nn.Linear(4, 4),
            "norm": nn.LayerNorm(4),
            "k": Linear(nn.Linear(4, 4)),
            "mlp": nn.Sequential(nn.Conv1d(4, 4, 1)),
        }
    )
    found = linear_maps(module)
    assert list(found) == ["q", "k", "mlp.0"]
    assert all(found[path] is module.get_submodule(path) for path in found)


class Int8Linear(nn.Module):
    """A map that holds no matrix, as quantised ones do."""

    def __init__(self, width=4) -> None:
        super().__init__()
        self.in_features = self.out_features = width


class Int8Table(Int8Linear):
    """The same by another name."""


class LinearByItsOwnCode(Int8Linear):
    """One that holds a matrix, with which its own code multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))


@pytest.mark.parametrize(
    ("module", "is_map"),
    [
        (Int8Linear(), True),
        (Int8Linear(2.5), False),
        (Int8Table(), False),
        (LinearByItsOwnCode(), False),
        (nn.Bilinear(4, 4, 4), False),
    ],
)
def test_a_module_of_another_library_counts_as_a_linear_map_by_name_if_it_holds_no_float_matrix(module, is_map):
    assert is_like_a_map(module) == is_map


class NamedSo(nn.Linear):
    """A map of torch's that has an attribute as GPT-2's."""

    nf = 4


@pytest.mark.parametrize("module", [Conv1D(6, 4), nn.Linear(4, 6), NamedSo(6, 4), nn.Conv1d(4, 6, 1)])
def test_input_and_output_features_of_a_linear_map_are_those_of_a_call(module):
    count = module.in_features if isinstance(module, nn.Linear) else 4
    x = torch.ones(1, count, 3) if isinstance(module, nn.Conv1d) else torch.ones(3, count)
    out = module(x)
    assert features(module) == (count, out.shape[1])
