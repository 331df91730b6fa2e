"""Operations of a forward outside attention, and on the way into it, are compared; what varies is no change."""

from __future__ import annotations

import pytest

from hdi_callback.monitor import contract
from tests.monitor import forwards


@pytest.fixture(autouse=True)
def _each_third_reading(monkeypatch):
    monkeypatch.setattr(contract, "EVERY", 3)
    monkeypatch.setattr(contract, "_FIRST", {1, 2, 4, 7})


WARNED = ["no activation", "relu", "skip lost", "MLP subtracted", "embedding not scaled", "no positions"]
"""What is a warning at once, of the operations: in a module that goes on something is lost."""
STOPPED = {"detached": ["`blocks.1.norm2.weight` and `blocks.1.norm2.bias` since step 32"]}
"""What runs as before, and is told because something stands still."""


@pytest.mark.parametrize("fault", forwards.FAULTS)
def test_what_a_forward_computes_otherwise_is_told_once_with_before_and_after(fault):
    every = [alert for alert in forwards.train(fault)[0] if alert.rule == contract.NAME]
    stopped = [alert for alert in every if alert.message.startswith("the training step")]
    alerts, says = [alert for alert in every if alert not in stopped], forwards.FAULTS[fault]
    assert len(alerts) == bool(says)
    assert [alert.message.partition("nothing has moved ")[2].partition(",")[0] for alert in stopped] == STOPPED.get(
        fault, []
    )
    for alert in alerts:
        assert says in alert.message
        assert alert.since == 31
        is_of_attention = alert.message.startswith(
            "attention in blocks.1.attention has changed between steps 30 and 36"
        )
        assert is_of_attention or alert.message.startswith("the forward has changed between steps 30 and 36")
        assert (alert.level == "warning") == (is_of_attention or fault in WARNED)


def test_as_many_changes_are_told_as_the_page_says():
    assert (sum(map(bool, forwards.FAULTS.values())), len(forwards.FAULTS)) == (23, 26)


NOTICED = {
    "stochastic depth that begins": "rand runs 2 times in `blocks.0-2`, and never before",
    "adapters merged": "nothing runs in `blocks.0-2.mlp.up.a` and `blocks.0-2.mlp.up.b` any more",
    "quantised from the middle on": "fake_quantize_per_tensor_affine_cachemask runs once with 0.05",
    "dropout switched off": "nothing runs in `blocks.0-2.mlp.drop` any more",
}
"""What is done on purpose and changes the forward: a notice that names it."""


@pytest.mark.parametrize("healthy", forwards.HEALTHY)
def test_of_a_healthy_forward_nothing_is_told_or_what_is_done_on_purpose_noticed(healthy):
    alerts = [alert for alert in forwards.train(healthy=healthy)[0] if alert.rule == contract.NAME]
    assert len(alerts) == (healthy in NOTICED)
    for alert in alerts:
        assert alert.level == "notice"
        assert NOTICED[healthy] in alert.message
