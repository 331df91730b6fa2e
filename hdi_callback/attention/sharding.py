"""Heads that are spread over ranks by tensor parallelism: each rank computes some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.layer import AttentionLayer, Survey


def over_all_ranks(survey: Survey, model: nn.Module) -> Survey:
    """Return layers with the heads of all ranks, in their order; a collective call if parameters are DTensors."""
    spread: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    meshes = dict.fromkeys(parameter.device_mesh for parameter in spread)
    heads = {layer.name: _heads(layer) for layer in survey.layers}
    for group in dict.fromkeys(mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)):
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, heads, group=group)
        for name, own in heads.items():
            union = [head for of_rank in of_ranks for head in of_rank.get(name, [])]
            heads[name] = list(dict.fromkeys(union)) or own
    layers = (
        layer if len(heads[layer.name]) == layer.num_heads else _with_heads(layer, heads[layer.name])
        for layer in survey.layers
    )
    return replace(survey, layers=tuple(layers))


def _heads(layer: AttentionLayer) -> list[Any]:
    """For each query head its rows in every parameter, as plain data: role, term, factor -> name and starts."""
    distinct = {"key": layer.key_of, "value": layer.value_of}
    heads = []
    for head in range(layer.num_heads):
        parts = []
        for role, weight in sorted(layer.weights.items()):
            at = distinct[role][head] if role in distinct else head
            for rows in (rows for term in weight.terms for rows in term.factors):
                own = 0 if rows.heads == 1 else at
                name = rows.names[own] if len(rows.names) > 1 else rows.names[0]
                parts.append((role, name, tuple(rows.starts[own].tolist())))
        heads.append(tuple(parts))
    return heads


def _with_heads(layer: AttentionLayer, heads: list[Any]) -> AttentionLayer:
    """Return a layer with the heads of all ranks."""
    weights, of_heads = {}, {}
    for role, weight in layer.weights.items():
        of_role = [tuple(part[1:] for part in head if part[0] == role) for head in heads]
        distinct = list(dict.fromkeys(of_role)) if role in ("key", "value") else of_role
        of_heads[role] = tuple(distinct.index(rows_of_head) for rows_of_head in of_role)
        at, terms = 0, []
        for term in weight.terms:
            factors = []
            for rows in term.factors:
                shared = len({rows_of_head[at] for rows_of_head in distinct}) == 1 and rows.heads == 1
                each = distinct[:1] if shared else distinct
                names = rows.names if len(rows.names) == 1 else tuple(rows_of_head[at][0] for rows_of_head in each)
                factors.append(
                    replace(rows, names=names, starts=torch.tensor([rows_of_head[at][1] for rows_of_head in each]))
                )
                at += 1
            terms.append(replace(term, factors=tuple(factors)))
        weights[role] = replace(weight, terms=tuple(terms))
    every = tuple(range(len(heads)))
    key_of, value_of = of_heads.get("key", every), of_heads.get("value", every)
    return replace(layer, weights=weights, key_of=key_of, value_of=value_of)


def gathered_heads(outputs: Mapping[str, tuple[AttentionLayer, Tensor | None]]) -> dict[str, Tensor | None]:
    """Return the outputs of all heads of layers whose heads are spread, `None` if a rank has none; collective."""
    groups: dict[Any, list[str]] = {}
    for name, (layer, _) in outputs.items() if dist.is_available() and dist.is_initialized() else ():
        group = group_of_heads(layer)
        if group is not None:
            groups.setdefault(group, []).append(name)
    gathered: dict[str, Tensor | None] = {}
    for group, names in groups.items():
        shapes: list[Any] = [None] * dist.get_world_size(group)
        own = [None if (outputs_here := outputs[name][1]) is None else tuple(outputs_here.shape) for name in names]
        dist.all_gather_object(shapes, own, group=group)
        for at, name in enumerate(names):
            layer, local = outputs[name]
            of_ranks = {rank[at] for rank in shapes}
            if local is not None and of_ranks == {tuple(local.shape)}:
                if local.shape[1] == layer.num_heads:
                    continue  # not spread: all ranks have all heads
                parts = [torch.empty_like(local) for _ in shapes]
                dist.all_gather(parts, local.contiguous(), group=group)
                gathered[name] = torch.cat(parts, dim=1)
            else:
                gathered[name] = None
    return gathered


def group_of_heads(layer: AttentionLayer) -> Any:
    """The ranks over which the output projection's input features are spread; `None` if they are not."""
    weight = layer.weights.get("output")
    if weight is None or layer.output_module is None:
        return None
    rows = weight.terms[0].factors[0]
    parameter: Any = weight.parameters()[0]
    dim_of_heads = 0 if rows.stride == 1 else 1
    for dim, placement in enumerate(parameter.placements if is_sharded(parameter) else ()):
        if placement.is_shard(dim_of_heads) and parameter.device_mesh.size(dim) > 1:
            return parameter.device_mesh.get_group(dim)
    return None
