"""Which architectures can return their attention weights, as the table of attention rows says it."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("transformers")

from tests.attention.sweep import architectures
from tests.attention.sweep.documented import documented
from tests.attention.sweep.rows import can_return
from tests.skips import NEEDS_NEWER_TRANSFORMERS


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_model_with_attention_can_return_its_weights(name):
    assert can_return(architectures.build(name))


@pytest.mark.parametrize("name", ["poolformer", "inkling_vision"])
def test_a_model_without_attention_cannot_though_its_family_records_some(name):
    try:
        model = architectures.build(name)
    except architectures.NoModelError:
        if version("transformers") >= "5.21":
            raise
        pytest.skip(NEEDS_NEWER_TRANSFORMERS)
    assert not can_return(model)


@pytest.mark.parametrize("name", ["granitemoehybrid", "recurrent_gemma", "sam3_lite_text_text_model"])
def test_a_small_hybrid_keeps_a_layer_with_attention(name):
    assert any(hasattr(part, "k_proj") for part in architectures.build(name).modules())


DOCUMENTED = """
audioflamingo3_encoder blip-2 blip_2_qformer blt_local_decoder blt_local_encoder bridgetower_vision_model clvp
decision_transformer deepseek_ocr2_encoder depth_pro dia dia_decoder dots3_note_audio_encoder fun_asr_nano_encoder
idefics inkling2_vision instructblip instructblipvideo jev kimi_k25_vision kosmos-2 kosmos_2_5_vision_model lightglue
mimi mimi_decoder mllama_vision_model molmo2_adapter molmo2_vision moshi_depth moss_transcribe_diarize_audio musicgen
musicgen_melody paddleocr_vl_vision patchtst patchtsmixer phi4_multimodal_audio pi0 pix2struct pix2struct_vision_model
qwen2_5_omni_audio_encoder qwen2_audio_encoder qwen3_asr_encoder qwen3_omni_moe_audio_encoder
qwen3_omni_moe_vision_encoder rag sam3_detr_decoder sam3_detr_encoder sam3_mask_decoder siglip2 siglip2_vision_model
speech-encoder-decoder speecht5 superglue t5gemma2_decoder timesfm timesfm2_5 unlimited_ocr_vision_encoder
video_llama_3_vision vitmatte vitpose vits voxtral_encoder voxtral_realtime_text xclip_vision_model
"""


@pytest.mark.some_slow(quick=3)
@pytest.mark.parametrize("name", DOCUMENTED.split())
def test_a_model_runs_as_its_documentation_calls_it(name):
    model = architectures.build(name)
    for batch in (2, 3):
        arguments = documented(model, batch)
        assert arguments is not None
        first, again = (tree_leaves(model(**arguments)) for _ in range(2))
        kept = [(one, other) for one, other in zip(first, again, strict=True) if isinstance(one, torch.Tensor)]
        assert kept
        assert all(torch.equal(one, other) for one, other in kept)
