"""Which architectures can return their attention weights, as the table of attention rows says it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.attention.sweep import architectures
from tests.attention.sweep.rows import can_return


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_model_with_attention_can_return_its_weights(name):
    assert can_return(architectures.build(name))


@pytest.mark.parametrize("name", ["poolformer", "inkling_vision"])
def test_a_model_without_attention_cannot_though_its_family_records_some(name):
    assert not can_return(architectures.build(name))
