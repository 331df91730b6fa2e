"""What is answered in place of norms, dropout and a top k, in a traced run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from hdi_callback.attention.trace import plain_norms


def test_topk_is_replaced_by_all_values_in_the_order_of_torch():
    x, cut = torch.randn(3, 40), SimpleNamespace(keeps_top=False, has_all=False)
    for largest in (True, False):
        answer = plain_norms.top(cast("Any", cut), torch.topk, (x, 2), {"largest": largest})
        expected, places = x.sort(-1, descending=largest)
        assert torch.equal(answer.values, expected)
        assert torch.equal(answer.indices, places)
    assert cut.has_all
    loose = plain_norms.top(cast("Any", cut), torch.topk, (x, 2), {"sorted": False})
    assert torch.equal(loose.values, x.gather(-1, loose.indices))
    cut.keeps_top = True
    assert plain_norms.top(cast("Any", cut), torch.topk, (x, 2), {}) is NotImplemented


def test_a_mean_over_tokens_keeps_its_gradient_and_a_mean_over_features_counts_as_centring():
    x = torch.randn(2, 3, 4, requires_grad=True)
    run = SimpleNamespace(centred=False, normed=[])
    cut = cast("Any", SimpleNamespace(run=run, draw=SimpleNamespace(keeps_means=False)))
    over_tokens = plain_norms.statistic(cut, torch.mean, (x,), {"dim": 1, "keepdim": True})
    assert torch.equal(over_tokens, x.mean(1, keepdim=True))
    assert over_tokens.requires_grad
    assert (run.normed, run.centred) == ([], False)
    over_features = plain_norms.statistic(cut, torch.mean, (x,), {"dim": -1, "keepdim": True})
    assert not over_features.requires_grad
    assert (len(run.normed), run.centred) == (1, True)
