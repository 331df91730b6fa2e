"""`state_of_this_model`: a checkpoint of another model is not taken up, one of other ranks of the same model is."""

from __future__ import annotations

import warnings

import pytest

from hdi_callback import HeadDiversityMonitor
from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.session.resume import sizes_of, state_of_this_model
from hdi_callback.monitoring.warn_once import WarnOnce
from tests.models import Classifier


@pytest.fixture(scope="module")
def layers():
    with HeadDiversityMonitor(Classifier()) as monitor:
        return monitor.layers


def state(layers, **more):
    return {"last_step": 3, "layers": {layer.name: sizes_of(layer) for layer in layers}, **more}


def test_a_state_written_over_ranks_may_list_layers_of_other_ranks(layers):
    mine, kept = layers[:1], state(layers, spans_ranks=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken = state_of_this_model(kept, mine, is_strict=False, warn_once=WarnOnce(), is_alone=False)
    assert taken is not None
    assert taken["last_step"] == 3


@pytest.mark.parametrize(("is_alone", "spans_ranks"), [(True, True), (False, False), (True, False)])
def test_missing_layers_mean_another_model_for_one_process_or_if_the_state_spans_no_ranks(
    layers, is_alone, spans_ranks
):
    kept = state(layers, **({"spans_ranks": True} if spans_ranks else {}))
    with pytest.warns(MonitoringWarning, match=f"this model lacks, or with other heads: `{layers[1].name}`"):
        assert state_of_this_model(kept, layers[:1], is_strict=False, warn_once=WarnOnce(), is_alone=is_alone) is None


def test_a_layer_with_other_heads_is_another_model_on_any_rank(layers):
    kept = state(layers, spans_ranks=True)
    kept["layers"][layers[0].name] = [7, 7, 1, 1]
    with pytest.warns(MonitoringWarning, match=f"`{layers[0].name}`"):
        assert state_of_this_model(kept, layers[:1], is_strict=False, warn_once=WarnOnce(), is_alone=False) is None
