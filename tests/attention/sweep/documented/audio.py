"""Forwards of what takes sounds, or gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.attention.sweep.documented.made import LENGTH, integers, noise, tokens


def _moshi_depth(model: Any, batch: int) -> dict[str, Any]:
    """A text token, then one token for each codebook but the last."""
    count = model.config.num_codebooks
    return {
        "input_ids": integers(100, batch, count),
        "last_hidden_state": noise(batch, 1, model.config.input_size),
        "use_cache": False,
    }


def _whole_window(model: Any, batch: int) -> dict[str, Any]:
    """As long as the positions that there are, before a filter of stride two."""
    return {"input_features": noise(batch, model.config.num_mel_bins, 2 * model.config.max_source_positions)}


def _masked_window(model: Any, batch: int) -> dict[str, Any]:
    arguments = _whole_window(model, batch)
    return arguments | {
        "input_features_mask": torch.ones(batch, arguments["input_features"].shape[-1], dtype=torch.long)
    }


def _low_frame_rate(model: Any, batch: int) -> dict[str, Any]:
    return {
        "input_features": noise(batch, LENGTH, model.config.input_size),
        "input_features_mask": torch.ones(batch, LENGTH, dtype=torch.long),
    }


def _dots3_note(model: Any, batch: int) -> dict[str, Any]:
    frames, config = 8 * LENGTH, model.config
    return {
        "input_features": noise(batch, config.feature_size, frames),
        "chunk_sample_lengths": torch.full((batch,), frames * config.hop_length),
    }


def _packed_sounds(model: Any, batch: int) -> dict[str, Any]:
    """All sounds one after the other."""
    frames = 2 * model.config.n_window
    lengths = torch.full((batch,), frames)
    arguments = {"input_features": noise(model.config.num_mel_bins, batch * frames), "feature_lens": lengths}
    return arguments | ({"aftercnn_lens": (lengths - 1) // 2 + 1} if "Qwen2_5" in type(model).__name__ else {})


def _chunks(model: Any, batch: int) -> dict[str, Any]:
    frames = 2 * model.config.n_window
    return {
        "input_features": noise(batch, model.config.num_mel_bins, frames),
        "input_features_mask": torch.ones(batch, frames, dtype=torch.long),
    }


def _phi4(model: Any, batch: int) -> dict[str, Any]:
    frames = 8 * LENGTH
    return {
        "hidden_states": noise(batch, frames, model.config.input_size),
        "mask": torch.ones(batch, frames, dtype=torch.bool),
    }


def _dia(model: Any, batch: int) -> dict[str, Any]:
    """A token for every channel at each time."""
    config = model.config.decoder_config
    return {
        "input_ids": tokens(batch),
        "decoder_input_ids": integers(min(100, config.vocab_size), batch, LENGTH, config.num_channels),
        "use_cache": False,
    }


def _dia_decoder(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": integers(min(100, config.vocab_size), batch, LENGTH, config.num_channels),
        "encoder_hidden_states": noise(batch, LENGTH + 2, config.cross_hidden_size),
    }


def _clvp(model: Any, batch: int) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": tokens(batch),
        "input_features": noise(batch, config.decoder_config.feature_size, 24),
    }


def _musicgen(model: Any, batch: int) -> dict[str, Any]:
    """A text, and a row of tokens for each codebook."""
    count = model.config.decoder.num_codebooks
    return {
        "input_ids": tokens(batch),
        "decoder_input_ids": integers(100, batch * count, LENGTH),
        "use_cache": False,
    }


def _speecht5(model: Any, batch: int) -> dict[str, Any]:
    """Without its nets for speech and text it takes what they would give."""
    width = model.config.hidden_size
    return {
        "input_values": noise(batch, LENGTH, width),
        "decoder_input_values": noise(batch, LENGTH + 2, width),
        "use_cache": False,
    }


def _speech_to_text(model: Any, batch: int) -> dict[str, Any]:
    return {"inputs": noise(batch, 1600), "decoder_input_ids": tokens(batch), "use_cache": False}


def _vits(model: Any, batch: int) -> dict[str, Any]:
    """So fast that every token takes one frame, whatever length random weights would give it."""
    return {"input_ids": tokens(batch, model.config.vocab_size), "speaking_rate": 1e30}


def _voice(model: Any, batch: int) -> dict[str, Any]:
    return {"input_values": noise(batch, 1, 6400)}


def _latents(model: Any, batch: int) -> dict[str, Any]:
    return {"latents": noise(batch, model.config.hidden_size, LENGTH)}


def _diffusion(model: Any, batch: int) -> dict[str, Any]:
    """Codes, each of which stands for a few frames."""
    config = model.config
    frames = 8 * config.repeats
    return {
        "hidden_states": noise(batch, frames, config.mel_dim),
        "condition_vector": noise(batch, frames, config.mel_dim),
        "speaker_embedding": noise(batch, frames, config.enc_emb_dim),
        "quantized_code": integers(min(100, config.num_embeds), batch, 8),
        "time_step": torch.tensor(0.5),
        "apply_cfg": False,
    }


FORWARDS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "AudioFlamingo3Encoder": _masked_window,
    "ClvpModelForConditionalGeneration": _clvp,
    "DiaDecoder": _dia_decoder,
    "DiaModel": _dia,
    "Dots3NoteAudioModel": _dots3_note,
    "FunAsrNanoEncoder": _low_frame_rate,
    "MimiDecoderModel": _latents,
    "MimiModel": _voice,
    "MoshiDepthDecoder": _moshi_depth,
    "MossTranscribeDiarizeAudioModel": _whole_window,
    "MusicgenForConditionalGeneration": _musicgen,
    "MusicgenMelodyForConditionalGeneration": _musicgen,
    "Phi4MultimodalAudioModel": _phi4,
    "PocketTTSAudioTokenizerDecoderModel": _latents,
    "Qwen2AudioEncoder": _whole_window,
    "Qwen2_5OmniAudioEncoder": _packed_sounds,
    "Qwen2_5OmniToken2WavDiTModel": _diffusion,
    "Qwen3ASREncoder": _chunks,
    "Qwen3OmniMoeAudioEncoder": _packed_sounds,
    "SpeechEncoderDecoderModel": _speech_to_text,
    "SpeechT5Model": _speecht5,
    "VitsModel": _vits,
    "VoxtralEncoder": _whole_window,
    "XcodecModel": _voice,
}
