"""Forwards of what takes texts, or numbers over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.attention.sweep.documented.made import LENGTH, integers, noise, tokens


def _patchtsmixer(model: Any, batch: int) -> dict[str, Any]:
    return {"past_values": noise(batch, model.config.context_length, model.config.num_input_channels)}


def _timesfm(model: Any, batch: int) -> dict[str, Any]:
    """Seven patches of numbers, none of them padding."""
    length = LENGTH * model.config.patch_length
    return {
        "past_values": noise(batch, length),
        "past_values_padding": torch.zeros(batch, length, dtype=torch.long),
        "freq": torch.zeros(batch, 1, dtype=torch.long),
    }


def _timesfm2_5(model: Any, batch: int) -> dict[str, Any]:
    return {"past_values": noise(batch, LENGTH * model.config.patch_length)}


def _decisions(model: Any, batch: int) -> dict[str, Any]:
    """What was seen, done and gained at each time."""
    config = model.config
    return {
        "states": noise(batch, LENGTH, config.state_dim),
        "actions": noise(batch, LENGTH, config.act_dim),
        "rewards": noise(batch, LENGTH, 1),
        "returns_to_go": noise(batch, LENGTH, 1),
        "timesteps": torch.arange(LENGTH)[None].repeat(batch, 1),
        "attention_mask": torch.ones(batch, LENGTH, dtype=torch.long),
    }


def _bytes_to_patches(model: Any, batch: int) -> dict[str, Any]:
    """Eight bytes in four patches."""
    return {
        "input_ids": tokens(batch, model.config.vocab_size, 8),
        "num_patches": 4,
        "patch_ids": (torch.arange(8) // 2)[None].repeat(batch, 1),
    }


def _patches_to_bytes(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "inputs_embeds": noise(batch, 8, config.hidden_size),
        "patch_embeds": noise(batch, 4, config.hidden_size_global),
    }


def _jev(model: Any, batch: int) -> dict[str, Any]:
    """Two questions, which all prompts ask at the same places."""
    return {
        "input_ids": tokens(batch),
        "marks": torch.tensor([[4, 6]] * batch),
        "num_options": torch.tensor([[2, 2]] * batch),
        "question_type_ids": torch.tensor([[0, 0]] * batch),
    }


def _rag(model: Any, batch: int) -> dict[str, Any]:
    """The documents that were found are given, with how well they fit."""
    count = model.config.n_docs
    return {
        "input_ids": tokens(batch),
        "context_input_ids": tokens(batch * count),
        "context_attention_mask": torch.ones(batch * count, LENGTH, dtype=torch.long),
        "doc_scores": noise(batch, count),
        "decoder_input_ids": tokens(batch),
        "use_cache": False,
    }


def _second_half(model: Any, batch: int) -> dict[str, Any]:
    return {
        "input_ids": tokens(batch, model.config.vocab_size),
        "encoder_hidden_states": noise(batch, LENGTH + 2, model.config.hidden_size),
        "use_cache": False,
    }


def _with_delay(model: Any, batch: int) -> dict[str, Any]:
    """How far the text is behind the sound is a vector of its own."""
    return {
        "input_ids": tokens(batch, model.config.vocab_size),
        "t_cond": noise(1, 1, model.config.hidden_size),
        "use_cache": False,
    }


def _esmfold2(model: Any, batch: int) -> dict[str, Any]:
    """One protein chain of few residues, each of a few atoms, with an alignment and what the language model gives."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    atoms, depth = 32, 5
    at = (torch.arange(atoms) * LENGTH // atoms)[None].repeat(batch, 1)
    atom_inputs = EsmFold2AtomInputs(
        ref_pos=noise(1, atoms, 3).expand(batch, -1, -1),  # keys are rotated by it: alike in all sequences
        ref_charge=torch.zeros(batch, atoms),
        atom_attention_mask=torch.ones(batch, atoms, dtype=torch.bool),
        ref_element=integers(20, batch, atoms),
        ref_atom_name_chars=integers(20, batch, atoms, 4),
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
        "res_type": integers(20, batch, LENGTH),
        "token_bonds": torch.zeros(batch, LENGTH, LENGTH, 1),
        "attention_mask": torch.ones(batch, LENGTH, dtype=torch.bool),
        "atom_inputs": atom_inputs,
        "msa": integers(20, batch, depth, LENGTH),
        "lm_hidden_states": noise(batch, LENGTH, backbone.num_hidden_layers + 1, backbone.hidden_size),
        "num_loops": 1,
    }


FORWARDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "BltLocalDecoder": _patches_to_bytes,
    "BltLocalEncoder": _bytes_to_patches,
    "DecisionTransformerModel": _decisions,
    "EsmFold2Model": _esmfold2,
    "JevForDecision": _jev,
    "PatchTSMixerModel": _patchtsmixer,
    "PatchTSTModel": _patchtsmixer,
    "RagModel": _rag,
    "T5Gemma2Decoder": _second_half,
    "TimesFm2_5Model": _timesfm2_5,
    "TimesFmModel": _timesfm,
    "VoxtralRealtimeTextModel": _with_delay,
}
