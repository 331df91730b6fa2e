"""The order of features within heads, and the features over which a norm subtracts the mean."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hdi_callback.attention.layer.heads import Centring, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoHeadsError, Rows, named
from hdi_callback.attention.trace.support import derivatives, weights_at


def order_features(view: CoreView, heads: dict[Role, list[Rows]]) -> str:
    """Order the features of heads as the columns of queries, keys or values; rotated ones stay ascending.

    Returns:
        What is left out of the heads, in words: values whose features are turned into one another, so that no row is
        what the output projection takes.

    Raises:
        NoHeadsError: if its weights are those of another core as well.
    """
    left_out = ""
    for role, rows in list(heads.items()):
        columns = view.trace.run.columns(view.tensor(role))
        ordered = []
        for row in rows:
            places = {feature: columns.get((row.parameter, feature), -2) for feature in row.features}
            if min(places.values()) < 0 or len(set(places.values())) < len(places):
                break
            ordered.append(replace(row, features=tuple(sorted(places, key=places.__getitem__))))
        if len(ordered) == len(rows):
            heads[role] = ordered
        elif role == "value":
            turned = f"the output of {named([heads.pop('value')[0].parameter])} is turned or mixed within each head"
            same = [core for core in view.trace.cores if not set(core.softmaxes).isdisjoint(view.core.softmaxes)]
            if len(same) > 1:  # which weigh other values too, so that the layer of those has the same heads
                raise NoHeadsError(turned)
            left_out = f"the weights of its values, as {turned}"
    return left_out


def centre(view: CoreView, heads: dict[Role, list[Rows]]) -> None:
    """Find the features over which a norm subtracts the mean: a shift of all of them changes nothing."""
    if not view.trace.run.centred:
        return
    run, cores = view.trace.with_means
    for role, rows in heads.items():
        first = rows[0]
        if first.inner is None:
            tensor = view.tensor(role, cores[view.number])
            weights = weights_at(tensor, view.at(view.first, role))
        else:  # the random output of the map cuts the graph
            tensor = next(leaf.input for leaf in run.leaves if leaf.parameter == first.parameter)
            weights = weights_at(tensor)
        target = first.inner or first
        centring: Centring = ""
        for number, derivative in derivatives(tensor, weights, run.tensors).items():
            leaf = run.leaves[number]
            if leaf.parameter != target.parameter or not derivative.any():
                continue
            live = derivative[derivative.abs().amax(1) > 0]
            own = [feature - leaf.start for feature in target.features]
            every = sorted({feature - leaf.start for row in rows for feature in (row.inner or row).features})
            if _cancels(live[:, own]):
                centring = "head"
            elif _cancels(live[:, every]) and len(every) > len(own):
                centring = "layer"
        if centring:
            heads[role] = [_centred(row, centring) for row in rows]


def _centred(row: Rows, centring: Centring) -> Rows:
    if row.inner is None:
        return replace(row, centring=centring)
    return replace(row, inner=replace(row.inner, centring="head"))


def _cancels(gradients: Tensor) -> bool:
    return bool((gradients.sum(-1).abs() < 1e-4 * gradients.abs().sum(-1)).all())
