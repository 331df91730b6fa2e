"""What torch's operations do, by name: the tables that all who read a tape share."""

# Attention, or a part of it, in one operation.
SOFTMAXES = {"_softmax", "_safe_softmax"}
EXPONENTIALS = {"exp", "exp2"}
SOFTMAX_LIKE = SOFTMAXES | EXPONENTIALS  # the exponentials of a softmax that is written out
WHOLE_LAYERS = {"_native_multi_head_attention", "_transformer_encoder_layer_fwd"}  # with their projections
FUSED_FLEX = "_scaled_dot_product_flex_attention"  # FlexAttention on a tape
# Attention in one operation -> the order in which it takes the dims of queries, keys and values but their features.
FUSED = {
    **{f"_scaled_dot_product_{name}": "b h q" for name in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention", "attention_math",
        "attention_math_for_mps", "fused_attention_overrideable", "flex_attention",
    )},
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward", "flash_attn::_flash_attn_forward",
                     "flash_attn_3::fwd", "xformers::efficient_attention_forward_cutlass", "xformers_flash::flash_fwd",
                     "xformers_flash3::flash_fwd"), "b q h"),
}  # fmt: skip

# Matmuls, with the position of the first factor among the arguments, and convolutions.
MATMULS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "addbmm": 1,
           "_addmm_activation": 1}  # fmt: skip
BATCHED = {"bmm", "baddbmm"}
CONVOLUTIONS = {"convolution", "mkldnn_convolution", "_slow_conv2d_forward", "_conv_depthwise2d", "conv_depthwise3d",
                "slow_conv3d_forward"}  # fmt: skip
MAPS = {*MATMULS, *CONVOLUTIONS}

# What they return does not depend on the content of what they take.
RANDOM = {"randn", "rand", "randint", "randperm", "normal", "randn_like", "rand_like", "uniform"}
SHAPED_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_ones",
               "new_full"}  # fmt: skip
EMPTY = SHAPED_LIKE | RANDOM | {"new_empty_strided", "fill", "zero", "bernoulli", "empty", "scalar_tensor", "arange",
                                "zeros", "ones", "full", "_local_scalar_dense", "exponential", "random",
                                "randint_like"}  # fmt: skip

# Elements stay what they are: copied, dropped, rounded, or moved (run on the ids of elements in place of values).
COPIES = {"clone", "_to_copy", "copy", "to", "lift_fresh_copy", "convert_element_type"}
DROPOUTS = {"native_dropout", "_fused_dropout"}
KEEPS = COPIES | DROPOUTS
RESHAPED_IN_PLACE = {"t", "transpose", "squeeze", "unsqueeze", "as_strided", "detach", "resize", "set", "resize_as"}
# It moves the range that it quantises to before it quantises, if its second argument says so.
OBSERVES = "_fused_moving_avg_obs_fq_helper"
QUANTISATIONS = {"fake_quantize_per_tensor_affine_cachemask", "fake_quantize_per_channel_affine_cachemask",
                 "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", OBSERVES}  # fmt: skip
INDEXED = {"index_select", "index", "gather", "take", "index_put", "_index_put_impl", "index_copy", "scatter",
           "index_fill", "masked_select", "masked_scatter", "_unsafe_index", "_unsafe_index_put", "embedding",
           "index_add", "repeat_interleave", "_unsafe_masked_index"}  # fmt: skip
MOVES = INDEXED | {"cat", "stack", "roll", "flip", "constant_pad_nd", "repeat", "slice_scatter", "select_scatter",
                   "as_strided_scatter", "diagonal_scatter", "unfold_copy", "im2col", "col2im", "pixel_shuffle",
                   "pixel_unshuffle", "channel_shuffle", "tril", "triu", "reflection_pad1d", "reflection_pad2d",
                   "replication_pad1d", "replication_pad2d", "upsample_nearest1d", "upsample_nearest2d",
                   "_upsample_nearest_exact2d", "diag_embed", "rot90", "block_diag", "split_with_sizes_copy",
                   "unbind_copy", "view_copy", "unfold_backward"}  # fmt: skip
SCATTERS = {"index_add", "scatter_add", "scatter_reduce", "index_reduce", "segment_reduce"}
CHOICES = {"topk", "sort", "max", "argmax", "multinomial"}  # after them weights are those of a router

# Element by element.
LINEAR = COPIES | DROPOUTS | {"add", "sub", "rsub", "mul", "div", "neg", "where", "masked_fill", "complex", "polar",
                              "_conj_physical", "conj_physical", "lerp", "addcmul", "nan_to_num"}  # fmt: skip
POINTWISE = {"hardswish", "hardsigmoid", "hardtanh", "elu", "silu", "softplus", "mish", "leaky_relu", "gelu",
             "_prelu_kernel", "addcdiv", "relu", "log_sigmoid_forward", "view_as_complex_copy",
             "rrelu_with_noise"}  # fmt: skip
# What scores pass before they are turned into weights: scale, bias, mask, a soft limit.
OF_SCORES = COPIES | {"add", "sub", "mul", "div", "masked_fill", "where", "tanh", "neg"}
MASKS = {"add", "sub", "mul", "where", "masked_fill", "div", "constant_pad_nd"}  # what scores are scaled and masked by
# What they return is a weight if what they take is one, perhaps with dropout or a norm: the first tensor of that size.
OF_WEIGHTS = DROPOUTS | QUANTISATIONS | {
    "add", "sub", "rsub", "mul", "div", "neg", "where", "masked_fill", "lerp", "nan_to_num",
    "_weight_norm_interface", "linalg_matrix_exp", "linalg_householder_product", "_linalg_solve_ex",
    "linalg_solve_triangular", "linalg_inv_ex", "linalg_qr",
}  # fmt: skip

# Over features or tokens.
NORMS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm",
         "_fused_rms_norm", "_batch_norm_no_update", "_native_batch_norm_legit_no_training",
         "_batch_norm_with_update"}  # fmt: skip
CUMULATIVE = {"cumsum", "cumprod", "cummax", "logcumsumexp"}
REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean", "norm",
                           "linalg_vector_norm", "logsumexp", "prod", "nansum", "any", "all", "median"}  # fmt: skip
RESAMPLINGS = {"avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
               "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "upsample_bilinear2d",
               "upsample_linear1d", "upsample_bicubic2d", "mkldnn_max_pool2d", "_upsample_bilinear2d_aa",
               "adaptive_avg_pool2d", "adaptive_avg_pool1d", "upsample_trilinear3d", "upsample_nearest3d",
               "grid_sampler_2d", "_fft_r2c", "_fft_c2r", "_fft_c2c"}  # fmt: skip
# Between two maps of a low-rank weight.
BETWEEN = KEEPS | NORMS | {"mul", "div", "pow", "mean", "rsqrt", "sqrt", "add", "reciprocal", "sum",
                           "linalg_vector_norm", "clamp_min", "neg", "sub"}  # fmt: skip
