"""Forwards as the documentation of a model shows them, where its inputs cannot be guessed from their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 7


def documented(model: nn.Module, batch: int) -> dict[str, Any] | None:
    """Give the keyword arguments of a model by its class; `None` where they are guessed."""
    make = _FORWARDS.get(type(model).__name__)
    return None if make is None else make(model, batch)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def _integers(most: int, *shape: int) -> Tensor:
    return torch.randint(1, most, shape, generator=torch.Generator().manual_seed(len(shape)))


def _idefics(model: Any, batch: int) -> dict[str, Any]:
    """One picture for each text; every token may attend to it."""
    side = model.config.vision_config.image_size
    return {
        "input_ids": _integers(model.config.vocab_size, batch, LENGTH),
        "pixel_values": _noise(batch, 1, 3, side, side),
        "image_attention_mask": torch.ones(batch, LENGTH, 1),
        "use_cache": False,
    }


def _patchtsmixer(model: Any, batch: int) -> dict[str, Any]:
    return {"past_values": _noise(batch, model.config.context_length, model.config.num_input_channels)}


def _moshi_depth(model: Any, batch: int) -> dict[str, Any]:
    """A text token, then one token for each codebook but the last."""
    count = model.config.num_codebooks
    return {
        "input_ids": _integers(100, batch, count),
        "last_hidden_state": _noise(batch, 1, model.config.input_size),
        "use_cache": False,
    }


def _esmfold2(model: Any, batch: int) -> dict[str, Any]:
    """One protein chain of few residues, each of a few atoms, with an alignment and what the language model gives."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    atoms, depth = 32, 5
    at = (torch.arange(atoms) * LENGTH // atoms)[None].repeat(batch, 1)
    atom_inputs = EsmFold2AtomInputs(
        ref_pos=_noise(1, atoms, 3).expand(batch, -1, -1),  # keys are rotated by it: alike in all sequences
        ref_charge=torch.zeros(batch, atoms),
        atom_attention_mask=torch.ones(batch, atoms, dtype=torch.bool),
        ref_element=_integers(20, batch, atoms),
        ref_atom_name_chars=_integers(20, batch, atoms, 4),
        ref_space_uid=at,
        atom_to_token=at,
    )
    order = torch.arange(LENGTH)[None].repeat(batch, 1)
    names = ("asym_id", "sym_id", "entity_id", "mol_type")
    backbone = model.config.esmc_config
    return {
        "token_index": order,
        "residue_index": order,
        **{name: torch.zeros_like(order) for name in names},
        "res_type": _integers(20, batch, LENGTH),
        "token_bonds": torch.zeros(batch, LENGTH, LENGTH, 1),
        "attention_mask": torch.ones(batch, LENGTH, dtype=torch.bool),
        "atom_inputs": atom_inputs,
        "msa": _integers(20, batch, depth, LENGTH),
        "lm_hidden_states": _noise(batch, LENGTH, backbone.num_hidden_layers + 1, backbone.hidden_size),
        "num_loops": 1,
    }


_FORWARDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "EsmFold2Model": _esmfold2,
    "IdeficsModel": _idefics,
    "MoshiDepthDecoder": _moshi_depth,
    "PatchTSMixerModel": _patchtsmixer,
}
