r"""Heads of the attention cores of a traced run.

For each row of the weights of a core, the supports of its queries, keys and values in the outputs of linear maps are
the features of its head:

.. math:: J = \operatorname{supp} \partial q / \partial(\text{outputs of maps})

Rows of equal support are one head. What does not fit is refused with what was observed: features that heads share, sums
of two maps, an activation in between, values that are no averages.

`CoreReading.heads` goes step by step: the parts of a core and what they meet (`parts`, `core_view`), supports
(`support`), the rows of each role (`role_rows`, `streams`), checks (`checks`), the order of features (`ordering`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.trace.checks import (
    added_inputs,
    are_mixtures,
    keys_of_several_tokens,
    learned_tokens,
    refuse_mixed,
    require_linear,
    require_tokens,
    require_widths,
)
from hdi_callback.attention.trace.core_view import CoreView, QueryKeys
from hdi_callback.attention.trace.graph_walk import is_rounded
from hdi_callback.attention.trace.head_rows import (
    NOT_FOLLOWED,
    ROUNDED,
    SINGLE_KEYS,
    VALUES_ARE_INPUTS,
    HeadRows,
    NoHeadsError,
    Rows,
    UndecidedError,
    module_of,
    named,
)
from hdi_callback.attention.trace.ordering import centre, order_features
from hdi_callback.attention.trace.parts import CoreParts
from hdi_callback.attention.trace.role_rows import (
    are_parts_side_by_side,
    leave_out_added_terms,
    leave_out_positional_features,
    leave_out_shared_features,
    rows_of_heads,
)
from hdi_callback.attention.trace.sequences import MOST_ROWS
from hdi_callback.attention.trace.streams import second_stream
from hdi_callback.attention.trace.support import Support, derivatives, element, weights_at
from hdi_callback.attention.trace.tied_rows import tied_rows
from hdi_callback.attention.trace.traced_cores import TracedCores
from hdi_callback.attention.trace.unread import NO_PRODUCTS, is_map_of_scores, is_over_tokens
from hdi_callback.attention.trace.weighed_tokens import weighs_tokens

_NO_MAP = "its {role}s come from no linear map of single tokens: they are learned, or a filter over tokens gives them"
_SEVERAL = "the attention weights of one head are computed from several softmaxes"
_THREE_TOKENS = "each of its scores is of three tokens, and not a product of a query and a key"
_TIED = "one map for all rows, of scores summed over them"
_OF_NO_MAP = "the queries of other tokens, which come from no linear map"
_STREAM = "one of two token streams that attend together"


class CoreReading:
    """The heads of one core.

    Args:
        trace: of the run.
        number: of the core.
    """

    def __init__(self, trace: TracedCores, number: int) -> None:
        self.trace, self.run, self.number, self.core = trace, trace.run, number, trace.cores[number]

    def streams(self) -> list[HeadRows]:
        """Read the rows of every head; of two streams of tokens that attend together, with maps of their own, each.

        Returns:
            The rows; where the queries of one stream alone are read, what the other gives is left out and named.

        Raises:
            NoHeadsError: as `heads` does.
        """
        first = self.heads()
        if first.row is None:
            return [first]
        maps = {one.parameter for one in first.rows.get("query", ())}
        row = CoreParts(self.trace, self.number).row_of_others(maps)
        if row is None:
            return [first]
        try:
            second = self.heads(of_row=row)
        except NoHeadsError:
            return [first]
        both = [first, second]
        used = [{(role, row.parameter) for role, of in one.rows.items() for row in of} for one in both]
        are_whole = all(one.row is not None and len(one.rows) == 3 and one.left_out == one.stream for one in both)
        if not are_whole or not used[0].isdisjoint(used[1]):
            return [first]
        for reading in both:
            reading.left_out = ""
            reading.remarks.append(_STREAM)
        return both

    def heads(self, *, of_row: int | None = None) -> HeadRows:
        """Read the rows of every head.

        Args:
            of_row: the query that is read; one that attends to most keys by default.

        Returns:
            The rows.

        Raises:
            NoHeadsError: if they cannot be read; without a reason where this is no attention over tokens at all.
            UndecidedError: if the run does not show them well enough.
        """
        core = self.core
        if not core.scores:
            self._refuse_scores_without_product()
        if len(core.softmaxes) > 1 and len(core.scores) > 1 and not self._are_side_by_side():
            raise NoHeadsError(_SEVERAL)
        if any(side.is_complex() for product in core.scores for side in product.factors):
            raise NoHeadsError("its scores are products of complex numbers")
        self._refuse_sums_of_single_tokens()
        self._refuse_weights_for_values()
        if not self.run.support(core.values):
            self._refuse_values_of_no_map()
        N = core.weights.shape[0]
        chosen = range(N) if N <= MOST_ROWS else sorted(set(torch.linspace(0, N - 1, MOST_ROWS).long().tolist()))
        parts = CoreParts(self.trace, self.number, of_row)
        parts.units = parts.find_units(chosen[0])
        units = [n * parts.units.count + part for n in chosen for part in range(parts.units.count)]
        pairs = {unit: found for unit in units if (found := parts.query_keys_of(unit))}
        if not pairs:
            if core.weights.shape[-1] < 2:
                raise UndecidedError(SINGLE_KEYS)
            raise UndecidedError("no query in its scores meets several keys")
        unit, of_first = next(iter(pairs.items()))
        product = parts.product_of_tokens(unit, of_first)
        is_of_others = False
        if not parts.is_of_a_map(of_first, product):
            # The query of a class token may be its input as it is, where a map gives those of the others.
            parts.is_last_first = True
            others = {unit: found for unit in units if (found := parts.query_keys_of(unit))}
            is_of_others = bool(others) and parts.is_of_a_map(next(iter(others.values())), product)
            pairs = others if is_of_others else pairs
        heads = self._grouped(CoreView(self.trace, self.number, core, parts.units, _of_product(pairs, product)))
        reason = _OF_NO_MAP if is_of_others and _OF_NO_MAP not in heads.left_out else ""
        heads.left_out = _joined(heads.left_out, reason)
        return heads

    def _grouped(self, view: CoreView) -> HeadRows:
        """Group the parts of the core into heads: parts of equal rows are one head."""
        tied = tied_rows(view)
        if tied is not None:
            view = replace(view, core=tied.first_row(self.core, view.product))
        require_tokens(view)
        stream, added = second_stream(view), added_inputs(view)
        members, of_heads = rows_of_heads(view)
        refuse_mixed(view, members)
        remarks = keys_of_several_tokens(view)
        if tied is not None:
            remarks.append(_TIED)
        has_shared = leave_out_shared_features(view, of_heads)
        if has_shared:
            remarks.append("without the part that all heads share")
        beside = "" if has_shared else leave_out_positional_features(view, of_heads)
        if any(len(rows) > 1 for rows in of_heads["key"]) and are_parts_side_by_side(view, of_heads["key"]):
            raise NoHeadsError(f"its keys are concatenated outputs of several maps: {_maps_of(of_heads['key'])}")
        positions = leave_out_added_terms(view, of_heads)
        mixed = [
            f"the mixing of the weights of all heads by `{name}` after the softmax"
            for node, name in self.run.mixed.items()
            if node in self.core.softmaxes
        ]
        heads, unread = _require_one_map_each(of_heads, view.core.values.shape[-1])
        # Under a softmax over queries each weight depends on all: the query shows whether it is of several tokens.
        of_query = self.run.support(view.tensor("query"), view.at(view.first, "query")[:1])
        if "query" in heads and of_query.is_of_several_positions:
            # Of several tokens: a filter or a mean keeps features in place, a maximum does not.
            if are_mixtures(view, view.tensor("query"), view.at(view.first, "query")[:1], of_query):
                remarks.append("queries of several tokens")
            else:
                del heads["query"]
        is_part = has_shared or bool(beside)
        require_widths(view, heads, has_shared=is_part)
        normed = require_linear(view, heads, has_shared=is_part)
        turned = order_features(view, heads)
        centre(view, heads)
        queries = "" if stream and "query" in heads else self._queries_left_out(view, heads, of_query)
        learned = "" if stream or beside else learned_tokens(view)
        left_out = _joined(unread or added, stream, beside, positions, learned, *mixed, turned, queries)
        row = int(view.at(view.first, "query")[0]) % view.tensor("query").shape[1]
        values = None if tied is None else tied.values
        return HeadRows(heads, members, normed, remarks, left_out, view.units, row if stream else None, values, stream)

    def _queries_left_out(self, view: CoreView, heads: dict[Role, list[Rows]], of_query: Support) -> str:
        """The queries that are not read, in words: all, or those of tokens with another map."""
        queries = view.tensor("query")
        count = queries.shape[1]
        first = int(view.at(view.first, "query")[0]) // count * count
        whole = self.run.support(queries, range(first, first + count))
        if "query" not in heads:
            if _are_of_two_tokens([self.run.support(queries, [at]) for at in range(first, first + count)]):
                raise NoHeadsError(_THREE_TOKENS)
            return "the weights of its queries" if whole else ""
        others = set(self.run.maps(whole)) - set(self.run.maps(of_query))
        if others:
            return f"the queries of other tokens, which come from {named(sorted(others))}"
        # Inputs of the module as they are; padding depends on nothing.
        if not Support.of(queries, self.run.inputs, range(first, first + count)):
            return ""
        some = sorted(set(torch.linspace(first, first + count - 1, 4).long().tolist()))
        are_inputs = (not self.run.support(queries, [at]) and Support.of(queries, self.run.inputs, [at]) for at in some)
        return _OF_NO_MAP if any(are_inputs) else ""

    def _are_side_by_side(self) -> bool:
        """Return whether each softmax has tokens of its own, as where learned prompts are attended to apart."""
        weights = self.core.weights
        edges = [torch.autograd.graph.GradientEdge(node, 0) for node in self.core.softmaxes]
        for number in range(weights.shape[-1]):
            column = torch.zeros(weights.shape)
            column[..., number] = weights_at(weights)[..., number]
            if sum(bool(derivative.any()) for derivative in derivatives(weights, column, edges).values()) > 1:
                return False
        return True

    def _refuse_scores_without_product(self) -> None:
        """Refuse attention whose scores are no products; a router of experts is not reported."""
        for logits in self.core.logits:
            for leaf in (self.run.leaves[number] for number in self.run.support(logits).masks):
                if is_map_of_scores(leaf, logits, self.trace.cores):
                    name = module_of(leaf.parameter)
                    raise NoHeadsError(f"its heads mix: `{name}` maps the scores of all heads before the softmax")
            if is_over_tokens(self.run, logits):
                raise UndecidedError(NO_PRODUCTS)
        if any(weighs_tokens(self.run, node) for node in self.core.softmaxes):
            raise UndecidedError(NO_PRODUCTS)
        raise NoHeadsError

    def _refuse_sums_of_single_tokens(self) -> None:
        """Refuse sums of a learned function of the query and one of the key as scores (graphs: GAT)."""
        core = self.core
        if len(core.scores) < 2 or len(core.logits) != 1 or not core.logits[0].requires_grad:
            return
        if any(all(map(self.run.support, product.sides)) for product in core.scores):
            return
        flat = core.logits[0].flatten()
        largest = element(flat.shape, int(flat.detach().argmax()))
        acting = [score.acting_on(flat, largest) for score in core.scores]
        if sum(any(map(len, sides)) for sides in acting) > 1:
            raise NoHeadsError("its scores are sums of a term of the query and one of the key, and not products")

    def _refuse_weights_for_values(self) -> None:
        """Refuse products of several attention matrices, as with landmarks (Nystromformer)."""
        behind = self.run.upstream_products
        for node in behind.first(self.core.values.grad_fn)[0]:
            logits = self.run.scores.get(node)
            if logits is not None and behind.first(logits.grad_fn)[1]:
                raise NoHeadsError(_SEVERAL)
        if behind.are_weights(self.core.values.grad_fn):
            raise NoHeadsError(_SEVERAL)

    def _refuse_values_of_no_map(self) -> None:
        """Refuse values that are the output of no linear map, with the reason."""
        values, run = self.core.values, self.run
        if not Support.of(values, run.inputs):
            if is_rounded(values):
                raise NoHeadsError(ROUNDED.format(role="value"))
            raise NoHeadsError(self.trace.source_convolution("value", values) or _NO_MAP.format(role="value"))
        matrix = self.trace.source_matrix(values)
        if matrix is not None and _has_matrix_per_token(values, run.parameters[matrix]):
            raise NoHeadsError(f"each token position has a value matrix of its own in `{module_of(matrix)}`")
        if all(run.support(side) for product in self.core.scores for side in product.sides):
            raise UndecidedError(VALUES_ARE_INPUTS)
        if matrix is not None and run.convolved:
            raise UndecidedError(self.trace.source_convolution("value", values) or _NO_MAP.format(role="value"))
        if matrix is not None:
            raise UndecidedError(NOT_FOLLOWED.format(role="value", name=module_of(matrix)))
        raise NoHeadsError  # a part of attention whose projections lie around it


def _are_of_two_tokens(queries: list[Support]) -> bool:
    """Return whether there is a query for each pair of tokens, of which one map takes one and another the other."""
    found = [tuple((leaf, query.positions(leaf)) for leaf in sorted(query.masks)) for query in queries]
    each = [{one[place] for one in found} for place in range(min(map(len, found)))]
    return len(each) > 1 and len(set(found)) > max(map(len, each))


def _of_product(pairs: dict[int, list[QueryKeys]], number: int) -> dict[int, QueryKeys]:
    """The query and keys of each part of a core in one product, keys on the same side as those of the first."""
    own = [(unit, one) for unit, of_unit in pairs.items() for one in of_unit if one.product == number]
    return {unit: one for unit, one in own if one.side == own[0][1].side}


def _has_matrix_per_token(values: Tensor, stack: Tensor) -> bool:
    """Return whether a stack has one matrix for each token position, as for each codebook."""
    if stack.dim() != 3 or values.shape[1] < 2:
        return False
    found = [Support.of(values, [stack], [at]) for at in (0, values.shape[1] - 1)]
    used = [{row // stack.shape[1] for row in support.positions(0)} for support in found]
    return all(len(numbers) == 1 for numbers in used) and used[0] != used[1]


def _require_one_map_each(of_heads: dict[Role, list[list[Rows]]], width: int) -> tuple[dict[Role, list[Rows]], str]:
    """Refuse keys and values without a projection, and keys of several; leave out such queries, and values of several.

    Returns:
        The rows of each role, and what is left out of the values, in words.

    Raises:
        NoHeadsError: if keys or values are refused.
        UndecidedError: if one of their maps takes what another one gives.
    """
    heads: dict[Role, list[Rows]] = {}
    unread = ""
    for role, found in of_heads.items():
        problems = [row.problem for rows in found for row in rows if row.problem]
        if problems and role == "query":
            continue
        if problems:
            raise UndecidedError(problems[0])
        if all(len(rows) == 1 for rows in found):
            heads[role] = [rows[0] for rows in found]
        elif role == "query":
            continue
        elif not any(found):
            raise NoHeadsError(_NO_MAP.format(role=role))
        elif role == "value" and _are_apart(found, width):
            unread = f"the weights of its values, which combine the outputs of {_maps_of(found)}"
        else:
            raise NoHeadsError(f"its {role}s are sums of the outputs of {_maps_of(found)}")
    return heads, unread


def _are_apart(of_heads: list[list[Rows]], width: int) -> bool:
    """Return whether a map has features for each head alone, as many as attention takes of its values.

    What another one adds to them, or weighs them with, makes them no rows of a map; keys and queries are theirs.
    """
    for parameter in {row.parameter for row in of_heads[0]}:
        found = {row.features for rows in of_heads for row in rows if row.parameter == parameter}
        if all(len(one) == width for one in found) and sum(map(len, found)) == len(set().union(*found)):
            return all(any(row.parameter == parameter for row in rows) for rows in of_heads)
    return False


def _maps_of(found: list[list[Rows]]) -> str:
    return named(sorted(row.parameter for rows in found for row in rows))


def _joined(*clauses: str) -> str:
    return " and ".join(filter(None, clauses))
