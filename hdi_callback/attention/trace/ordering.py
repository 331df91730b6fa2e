"""`FeatureOrder`: the order of features within heads, and over which of them a norm subtracts the mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import Centring, Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import NoHeadsError, Rows
from hdi_callback.attention.trace.support import derivatives, random_weights, weights_at


class FeatureOrder(CoreView):
    """The order and the centring of the features of heads."""

    def order(self, heads: dict[Role, list[Rows]], members: list[list[int]], product: int, places: Any) -> None:
        """Order the features of heads as the columns of what attention takes; rotated ones stay ascending."""
        keys = places[members[0][0]][0]
        tensors = {"query": self.side(product, 1 - keys), "key": self.side(product, keys), "value": self.core.values}
        for role, rows in heads.items():
            columns = self.columns(tensors[role])
            ordered = []
            for one in rows:
                known = [columns.get((one.parameter, feature), {-2}) for feature in one.features]
                places_of = [next(iter(found)) if len(found) == 1 else -2 for found in known]
                if min(places_of) < 0 or len(set(places_of)) < len(places_of):
                    break
                order = sorted(range(len(places_of)), key=places_of.__getitem__)
                ordered.append(replace(one, features=tuple(one.features[i] for i in order)))
            if len(ordered) == len(rows):
                heads[role] = ordered
            elif role == "value":
                raise NoHeadsError("the features of its heads' outputs are no averages of those of one value map")

    def centre(self, heads: dict[Role, list[Rows]], members: list[list[int]], product: int, places: Any) -> None:
        """See over which features a norm subtracts the mean: all of them together then change nothing."""
        if not self.trace.run.centred:
            return
        run, cores = self.trace.with_means
        core = cores[self.number]
        n = members[0][0]
        keys, at_query, at_keys = places[n]
        for role, rows in heads.items():
            one = core.scores[product]
            side = keys if role == "key" else 1 - keys
            tensor = core.values if role == "value" else (one.right if side else one.left)
            at = at_keys if role == "key" else at_query
            first_value = n // self.units.count * core.values.shape[1]
            at = torch.arange(core.values.shape[1]) + first_value if role == "value" else at
            gradient = weights_at(tensor, at)
            first = rows[0]
            if first.inner is not None:  # the map's answer cuts the graph
                tensor = next(leaf.taken for leaf in run.leaves if leaf.parameter == first.parameter)
                gradient = random_weights(tensor.shape)
            found = derivatives(tensor, gradient, run.tensors)
            target = first if first.inner is None else first.inner
            centring: Centring = ""
            for leaf, derivative in found.items():
                if run.leaves[leaf].parameter != target.parameter or not derivative.any():
                    continue
                live = derivative[derivative.abs().amax(1) > 0]
                start = run.leaves[leaf].start
                own = [feature - start for feature in target.features]
                every = sorted({feature - start for other in rows for feature in (other.inner or other).features})
                if _cancels(live[:, own]):
                    centring = "head"
                elif _cancels(live[:, every]) and len(every) > len(own):
                    centring = "layer"
            if centring:
                heads[role] = [_centred(row, centring) for row in rows]


def _centred(row: Rows, centring: Centring) -> Rows:
    if row.inner is None:
        return Rows(row.parameter, row.features, None, (), centring)
    inner = Rows(row.inner.parameter, row.inner.features, None, (), "head")
    return Rows(row.parameter, row.features, inner, row.gain)


def _cancels(gradients: Tensor) -> bool:
    return bool((gradients.sum(-1).abs() < 1e-4 * gradients.abs().sum(-1)).all())
