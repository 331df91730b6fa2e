"""The faults: what is done to a healthy training, from the middle of it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from tests.studies.experiments.held_out.model import Attention, Experts, Gated, Net, head_rows
from tests.studies.experiments.held_out.tasks import Task, attention_layers

ROLES = ("q", "k", "v", "out")


@dataclass
class Run:
    """A training that a fault acts on; `is_first` is true at the first step of the fault."""

    model: Net
    optimizer: torch.optim.Optimizer
    task: Task
    number: int
    is_first: bool = True
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> list[Attention]:
        return attention_layers(self.model)

    @property
    def layer(self) -> Attention:
        return self.layers[self.number % len(self.layers)]

    @property
    def other(self) -> Attention:
        return self.layers[(self.number + 1) % len(self.layers)]


Act = Callable[[Run], None]


@dataclass(frozen=True)
class Fault:
    """One way in which a training goes wrong.

    Attributes:
        before: called before each optimizer step from the onset on.
        after: called after each of these.
        begin: called before the first step, where there is no onset.
        is_causal: whether it needs a causal mask.
        tasks: the tasks that it is tried on, where it makes sense for some only.
    """

    before: Act | None = None
    after: Act | None = None
    begin: Act | None = None
    is_causal: bool = False
    tasks: tuple[str, ...] = ()


def _once(act: Act) -> Act:
    return lambda run: act(run) if run.is_first else None


def _initialise(run: Run) -> None:
    for role in ROLES:
        weight = head_rows(run.layer, role)
        weight.copy_(torch.empty_like(weight).uniform_(-1, 1) * weight.shape[-1] ** -0.5)


def _overwrite(run: Run) -> None:
    for role in ROLES:
        head_rows(run.layer, role).copy_(head_rows(run.other, role))


def _tie_keys(run: Run) -> None:
    keys = head_rows(run.layer, "k")
    keys[1] = keys[0]


def _raise_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 60


def _leave_out(run: Run) -> None:
    """Take the attention of a layer, or all adapters, out of the optimizer."""
    adapters = [value for name, value in run.model.named_parameters() if "lora_" in name]
    left_out = {id(value) for value in adapters or run.layer.parameters()}
    for group in run.optimizer.param_groups:
        group["params"] = [value for value in group["params"] if id(value) not in left_out]


def _freeze(*roles: str, head: int | None = None) -> Act:
    def act(run: Run) -> None:
        for role in roles:
            weight = head_rows(run.layer, role)
            weight = weight if head is None else weight[head]
            weight.copy_(run.kept.setdefault(role, weight.clone()))

    return act


def _spoil(run: Run) -> None:
    head_rows(run.layer, "v")[1, 0, 0] = torch.nan


def _copy_head(run: Run) -> None:
    for role in ROLES:
        weight = head_rows(run.layer, role)
        weight[1] = weight[0]


def _zero(role: str, head: int) -> Act:
    return lambda run: head_rows(run.layer, role)[head].zero_()  # type: ignore[return-value]


def _lose_mask(run: Run) -> None:
    for layer in run.layers:
        layer.is_causal = False


def _swap_queries_and_keys(run: Run) -> None:
    q, k = head_rows(run.layer, "q"), head_rows(run.layer, "k")
    before = q.clone()
    q.copy_(k)
    k.copy_(before)


def _roll_heads(run: Run) -> None:
    v = head_rows(run.layer, "v")
    v.copy_(v.roll(1, 0))


def _scale(role: str, factor: float) -> Act:
    return lambda run: head_rows(run.layer, role).mul_(factor)  # type: ignore[return-value]


def _scale_scores(run: Run) -> None:
    run.layer.factor = 8.0


def _flatten_scores(run: Run) -> None:
    run.layer.factor = 0.02


def _drop(run: Run) -> None:
    run.layer.drop = 0.9


def _no_gradient(run: Run) -> None:
    """Lose the gradients of queries and keys of all layers."""
    for layer in run.layers:
        for role in ("q", "k"):
            for value in getattr(layer, f"{role}_proj").parameters():
                value.grad = None


def _freeze_norm(run: Run) -> None:
    """Put the gain before a layer's attention to zero, so that all of its tokens are alike."""
    run.model.norms[2 * (run.number % len(run.layers))].weight.zero_()


def _decay(run: Run) -> None:
    for role in ROLES:
        for layer in run.layers:
            head_rows(layer, role).mul_(0.96)


def _collapse_values(run: Run) -> None:
    for role in ("v", "out"):
        weight = head_rows(run.layer, role)
        weight += 0.1 * (weight.mean(0, keepdim=True) - weight)


def _go_back(run: Run) -> None:
    """Load the initial weights of one layer, of the run's start."""
    run.layer.load_state_dict(run.kept["initial"])


def _round(run: Run) -> None:
    """Keep weights in bf16 under a rate that is too small for it."""
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.02


def _round_after(run: Run) -> None:
    for value in run.model.parameters():
        value.copy_(value.bfloat16())


def _stale(run: Run) -> None:
    """Give the attention of a layer the updates of noise."""
    for value in run.layer.parameters():
        if value.grad is not None:
            value.grad.copy_(torch.randn_like(value) * value.grad.norm())


def _set(name: str, value: float) -> Act:
    return lambda run: setattr(run.layer, name, value)


def _swap_layers(run: Run) -> None:
    state = {name: value.clone() for name, value in run.layer.state_dict().items()}
    run.layer.load_state_dict(run.other.state_dict())
    run.other.load_state_dict(state)


def _roll_outputs(run: Run) -> None:
    out = head_rows(run.layer, "out")
    out.copy_(out.roll(1, 0))


def _add_noise(run: Run) -> None:
    for role in ROLES:
        weight = head_rows(run.layer, role)
        weight += weight.std() * torch.randn_like(weight)


def _flip_gradients(run: Run) -> None:
    for value in run.layer.parameters():
        if value.grad is not None:
            value.grad.neg_()


def _note(part: str) -> Act:
    return lambda run: run.kept.update(before=[value.clone() for value in getattr(run, part).parameters()])


def _go_further(part: str, times: int) -> Act:
    """Take the steps of a part of the training, the layer or the model, so many times."""

    def act(run: Run) -> None:
        for value, before in zip(getattr(run, part).parameters(), run.kept["before"]):
            value.copy_(before + times * (value - before))

    return act


def _raise_gain(run: Run) -> None:
    run.model.norms[2 * (run.number % len(run.layers))].weight.mul_(20)


def _decay_scores(run: Run) -> None:
    for role in ("q", "k"):
        head_rows(run.layer, role).mul_(0.95)


def _embed_anew(run: Run) -> None:
    for value in run.model.embed.parameters():
        value.copy_(value.std() * torch.randn_like(value))


def _lose_skip(run: Run) -> None:
    run.model.has_skips[run.number % len(run.layers)] = False


def _roll_vocabulary(run: Run) -> None:
    embed = next(run.model.embed.parameters())
    embed.copy_(embed.roll(1, 0))


def _zero_positions(run: Run) -> None:
    run.model.places.zero_()


def _skip_norm(run: Run) -> None:
    run.model.norms[2 * (run.number % len(run.layers))] = torch.nn.Identity()


def _initialise_mlp(run: Run) -> None:
    for part in run.model.mlp[run.number % len(run.layers)]:
        if isinstance(part, torch.nn.Linear):
            part.reset_parameters()


def _accumulate(run: Run) -> None:
    """Add the gradients of all steps of a layer, as if they were never cleared."""
    for place, value in enumerate(run.layer.parameters()):
        if value.grad is not None:
            run.kept[place] = run.kept.get(place, 0) + value.grad
            value.grad.copy_(run.kept[place])


def _decay_outputs(run: Run) -> None:
    for role in ("v", "out"):
        head_rows(run.layer, role).mul_(0.95)


def _exchange_queries(run: Run) -> None:
    q = head_rows(run.layer, "q")
    q[:2] = q[:2].flip(0).clone()


def _shake(run: Run) -> None:
    for role in ROLES:
        weight = head_rows(run.layer, role)
        weight += 0.1 * weight.std() * torch.randn_like(weight)


def _triple_output(run: Run) -> None:
    run.model.shares[run.number % len(run.layers)] = 3.0


def _enlarge_embedding(run: Run) -> None:
    for value in run.model.embed.parameters():
        value.mul_(5)


# Blind: written after public reports, named by owner/repo number, and committed, without a look at any rule.


def _lose_state(run: Run) -> None:
    """Resume without the optimizer's state: matterport/Mask_RCNN 1726, NVlabs/stylegan2-ada-pytorch 108."""
    run.optimizer.state.clear()


def _exchange_state(run: Run) -> None:
    """Load the state in another order of the parameters: piergiaj/pytorch-i3d 38, pytorch/pytorch 6031."""
    values = [value for group in run.optimizer.param_groups for value in group["params"]]
    for shape in {value.shape for value in values}:
        alike = [value for value in values if value.shape == shape and value in run.optimizer.state]
        states = [run.optimizer.state[value] for value in alike]
        run.optimizer.state.update(zip(alike, states[1:] + states[:1]))


def _skip(run: Run) -> None:
    """Skip the steps, as gradients overflow at each: NVIDIA/apex 715, NVIDIA/tacotron2 112."""
    run.optimizer.zero_grad()


def _keep_average(run: Run) -> None:
    """Leave the averaged weights in the model at each validation, every ten steps.

    PKU-YuanGroup/Open-Sora-Plan 186, harubaru/waifu-diffusion 31.
    """
    run.kept["step"] = run.kept.get("step", -1) + 1
    values = [value for value in run.model.parameters() if value.requires_grad]
    averages = run.kept.setdefault("averages", [value.clone() for value in values])
    for value, average in zip(values, averages):
        average.lerp_(value, 0.02)
        if run.kept["step"] % 10 == 0:
            value.copy_(average)


def _overwrite_last_layer(run: Run) -> None:
    """Load the embedding as the last layer, which is not tied to it: NVIDIA-NeMo/Automodel 2571."""
    run.model.head.weight.copy_(next(run.model.embed.parameters()))


def _reorder_rotary(run: Run) -> None:
    """Load the rows of queries and keys in the order of the other rotary layout.

    meta-pytorch/gpt-fast 190, nurl-lang/nurl 584, ooples/AiDotNet 2074.
    """
    for layer in run.layers:
        for projection in (layer.q_proj, layer.k_proj):
            for value in projection.parameters():
                halves = value.unflatten(0, (layer.num_heads, 2, -1))
                value.copy_(halves.transpose(1, 2).flatten(0, 2))


def _split_otherwise(run: Run) -> None:
    """Split queries, keys and values, stored one after the other, as if they were stored head by head.

    hpcaitech/ColossalAI 817, awslabs/slapo 46.
    """
    for layer in run.layers:
        projections = [
            getattr(projection, "base_layer", projection) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
        ]
        for name in ("weight", "bias"):
            values = [getattr(projection, name) for projection in projections]
            fused = torch.cat(values).unflatten(0, (layer.num_heads, len(values), -1))
            for value, part in zip(values, fused.unbind(1)):
                value.copy_(part.flatten(0, 1))


def _merge_twice(run: Run) -> None:
    """Merge adapters that stay in use: unslothai/unsloth 289, huggingface/peft 1355."""
    for module in run.model.modules():
        if hasattr(module, "get_delta_weight"):
            module.base_layer.weight.add_(module.get_delta_weight("default"))


def _cut_without_transpose(run: Run) -> None:
    """Cut heads by a view where a transpose is needed: reczoo/FuxiCTR 30, jsbaan/transformer-from-scratch 6."""
    for layer in run.layers:
        layer.cuts_without_transpose = True


def _change_outputs(dim: int) -> Act:
    """Compare labels with the outputs before them, of the token or of the sample.

    Token: huggingface/transformers 47394 and 44642. Sample: tensorflow/tensorflow 21033, aidotse/LeakPro 315.
    """

    def act(run: Run) -> None:
        run.model.change_outputs = lambda outputs: outputs.roll(1, dim)

    return act


def _normalise_twice(run: Run) -> None:
    """Normalise pixels that are normalised: soumith/imagenet-multiGPU.torch 18, 4uiiurz1/pytorch-nested-unet 62."""
    run.model.change_inputs = lambda inputs: inputs / 8 - 1


def _see_padding(run: Run) -> None:
    """Lose the mask of padding: NVIDIA-NeMo/Automodel 3704, axolotl-ai-cloud/axolotl 3735."""
    run.model.sees_padding = True


def _clip_scaled(run: Run) -> None:
    """Clip gradients to 1 while they are 65,536 times too large: pytorch/examples 1196, rwth-i6/returnn 1595."""
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1 / 65_536)


# Blind again: as those before.


def _nets(run: Run) -> list[Net]:
    return [module for module in run.model.modules() if isinstance(module, Net)]


def _reorder_classes(run: Run) -> None:
    """Sort the classes as text, "10" before "2": fastai/fastai 3945, facebookresearch/deit 130."""

    def act(outputs: torch.Tensor) -> torch.Tensor:
        return outputs[..., sorted(range(outputs.shape[-1]), key=lambda number: str(number + 1))]

    run.model.change_outputs = act


def _lose_tokens(run: Run) -> None:
    """Read a third of the vocabulary as unknown: huggingface/transformers 131, shmsw25/qa-hard-em 14."""
    net = getattr(run.model, "encoder", run.model)
    unknown = net.embed.num_embeddings - 1
    net.change_inputs = lambda tokens: tokens.masked_fill(tokens % 3 == 1, unknown)


def _mix(run: Run) -> None:
    """Mix each input with that of another sample, and leave the labels: 983632847/USCL 3, xudonmao/VMT 1."""
    run.model.change_inputs = lambda inputs: (inputs + inputs[torch.randperm(len(inputs))]) / 2


def _read_mask_backwards(run: Run) -> None:
    """Take True in a mask of padding for its opposite: pytorch/pytorch 170404, rasbt/LLMs-from-scratch 1061."""
    for net in _nets(run):
        net.sees_only_padding = True


def _attend_across_batch(run: Run) -> None:
    """Take the batch for the tokens: IBM/TabFormer 14, Exorust/TorchLeet 5, DaoyuanLi2816/Molecule-Generator 22."""
    for layer in run.layers:
        layer.attends_across_batch = True


def _drop_what_to_keep(run: Run) -> None:
    """Take the share that dropout is to keep for the one that it drops.

    aymericdamien/TensorFlow-Examples 205, piergiaj/pytorch-i3d 58, titu1994/Inception-v4 5.
    """
    for net in _nets(run):
        for mlp in net.mlp:
            mlp.append(torch.nn.Dropout(0.8))


def _saturate(run: Run) -> None:
    """Clip what the norms return at a scale of fp8 that is out of date: AI-Hypercomputer/maxtext 672."""
    for net in _nets(run):
        for norm in net.norms[:-1]:
            norm.register_forward_hook(lambda module, inputs, outputs: outputs.clamp(-0.3, 0.3))


def _move_positions(run: Run) -> None:
    """Count positions from the padding before each sample: tloen/alpaca-lora 315, huggingface/transformers 48946."""
    for net in _nets(run):
        net.moves_positions = True


def _softmax(run: Run) -> None:
    """Put a softmax before the cross-entropy, which has one.

    bowang-lab/Transformer-GCN-QA 32, bkitano/llama-from-scratch 5.
    """
    run.model.change_outputs = lambda outputs: outputs.softmax(-1)


def _use_logarithm(run: Run) -> None:
    """Multiply similarities by the logarithm of their scale: BAAI-DCAI/M3D 52."""
    run.task.uses_logarithm = True  # type: ignore[attr-defined]


def _stop_gradients(run: Run) -> None:
    """Lose the gradients of all but the last layer, as under checkpointing of inputs that need none.

    mlfoundations/open_clip 573, microsoft/LoRA 120.
    """
    model = run.model
    parts = [model.head, model.norms[-3:], model.attention[-1], model.mlp[-1]]
    if hasattr(model, "cross"):
        parts += [model.cross[-1], model.cross_norms[-1]]
    reached = {id(value) for part in parts for value in part.parameters()}
    for value in model.parameters():
        if id(value) not in reached:
            value.grad = None


def _run_out(run: Run) -> None:
    """Let the schedule run out in ten steps, as each process moves it.

    huggingface/transformers 24088, SafeAILab/EAGLE 107.
    """
    run.kept["steps"] = run.kept.get("steps", 0) + 1
    for group in run.optimizer.param_groups:
        group["lr"] *= max(0.01, 1 - run.kept["steps"] / 10)


def _decay_all(run: Run) -> None:
    """Decay all weights, gains and biases at each step, whatever the rate: tensorflow/addons 844 and 1902."""
    for value in run.model.parameters():
        if value.requires_grad:
            value.mul_(0.98)


def _renew_last_layer(run: Run) -> None:
    """Load all but the last layer; where it was tied to the embedding, it no longer is, and is not trained.

    huggingface/transformers 45079, vec2text/vec2text 94.
    """
    if run.model.head.weight is next(run.model.embed.parameters()):
        run.model.head.weight = torch.nn.Parameter(run.model.head.weight.clone())
    run.model.head.reset_parameters()


def _base(projection: torch.nn.Module) -> torch.nn.Linear:
    return getattr(projection, "base_layer", projection)  # type: ignore[return-value]


def _transpose(run: Run) -> None:
    """Load square weights the other way round: huggingface/transformers 47031."""
    for layer in run.layers:
        for role in ROLES:
            weight = _base(getattr(layer, f"{role}_proj")).weight
            weight.copy_(weight.T.clone())


def _repeat_shard(run: Run) -> None:
    """Load the first half of the rows of queries, keys, values and MLPs for the second too.

    vllm-project/vllm-gguf-plugin 103, EvolvingLMMs-Lab/lmms-engine 160.
    """
    first = [mlp[0] for net in _nets(run) for mlp in net.mlp]
    for part in first + [getattr(layer, f"{role}_proj") for layer in run.layers for role in ("q", "k", "v")]:
        for value in (_base(part).weight, _base(part).bias):
            left, right = value.chunk(2)
            right.copy_(left)


# Third blind: as those before.


def _set_all(name: str, value: float) -> Act:
    """Set an attribute of the attention of all layers, of which these are reports.

    normalises over queries: labmlai/annotated_deep_learning_paper_implementations 282, nerdai/llms-from-scratch-rs 30.
    looks ahead: RVC-Boss/GPT-SoVITS 965, jadore801120/attention-is-all-you-need-pytorch 19.
    tiles keys: apple/axlearn 842, onnx/onnx 7274.
    keeps the cache: huggingface/transformers 28056, shihao1895/MemoryVLA 18.
    base of rotary positions: sgl-project/SpecForge 265, lyogavin/airllm 369.
    window, of the fourth blind: in unslothai/unsloth 8253 none reached the kernel, and all that came before is seen.
    """

    def act(run: Run) -> None:
        for layer in run.layers:
            setattr(layer, name, value)

    return act


def _raise_gains(run: Run) -> None:
    """Take gains for what they are above one: Blaizzy/mlx-vlm 2041, linkedin/Liger-Kernel 74."""
    for module in run.model.modules():
        if isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm)):
            module.weight.add_(1)


def _round_to_four_bits(run: Run) -> None:
    """Merge into weights of four bits: huggingface/transformers 31293, ARahim3/mlx-tune 15."""
    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear):
            unit = module.weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 7
            module.weight.copy_((module.weight / unit).round() * unit)


def _add_biases_of_ranks(run: Run) -> None:
    """Add biases on each of four ranks, before the sum over them: Wenyueh/MinivLLM 80, awslabs/slapo 10."""
    for module in run.model.modules():
        name = "out_proj" if isinstance(module, Attention) else "down"
        parts = [getattr(module, name)] if hasattr(module, name) else []
        if isinstance(module, torch.nn.Sequential) and isinstance(module[2], torch.nn.Linear):
            parts.append(module[2])
        for part in parts:
            part.register_forward_hook(lambda part, inputs, outputs: outputs + 3 * part.bias)


def _leave_behind(run: Run) -> None:
    """Replace the parameters of the model, not those of the optimizer: microsoft/nni 4521, openvinotoolkit/nncf 327."""
    for module in run.model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                setattr(module, name, torch.nn.Parameter(value.clone()))


def _halve_moments(run: Run) -> None:
    """Keep second moments in half precision: ultralytics/ultralytics 24085, warner-benjamin/optimi 15."""
    for state in run.optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())


def _reduce_in_another_order(run: Run) -> None:
    """Average gradients with those of other weights of their shape, as ranks have them ready in another order.

    deepspeedai/DeepSpeed 2343, pytorch/pytorch 64629.
    """
    gradients = [value.grad for value in run.model.parameters() if value.grad is not None]
    for shape in {gradient.shape for gradient in gradients}:
        alike = [gradient for gradient in gradients if gradient.shape == shape]
        others = [gradient.clone() for gradient in alike[1:] + alike[:1]]
        for gradient, other in zip(alike, others):
            gradient.lerp_(other, 0.5)


def _set_of_task(name: str) -> Act:
    """Change the loss of a task, of which these are reports.

    broadcasts advantages: RLinf/RLinf 1568, RITCHIEHuang/DeepRL_Algorithms 13.
    counts padding: lucidrains/DALLE-pytorch 57, huggingface/transformers 7828.

    Of the fourth blind:

    sees all: in alex-hh/profam 495 packed documents are told from one another's tokens; huggingface/nanoVLM 204 finds
        that positions which begin anew do not keep a sample from another.
    continues positions: in huggingface/nanoVLM 201 the second packed sample begins at position 101, and in
        hiyouga/LlamaFactory 7318 packing had masks and no positions of its own.
    mirrors inputs alone: in tongtybj/TrTr 13 the mask is not mirrored with the picture; in
        albumentations-team/albumentations 549 a user gets other flips for pictures than for masks.
    takes last place: zihangdai/xlnet 73 and rasbt/LLMs-from-scratch 990: the last state of a padded input is that of
        padding.
    forgets ends: in mlabonne/llm-course 33 and huggingface/alignment-handbook 127 padding is the end token, whose label
        is ignored, and models never stop.
    averages parts: huggingface/transformers 34191 and huggingface/blog 2414: means of parts were averaged, whatever
        their numbers of tokens.
    is sorted: Deci-AI/super-gradients 416: ImageNet is not shuffled, so that batches are of one class;
        open-mmlab/mmdetection 1649: nor is any data on one GPU.
    """
    return lambda run: setattr(run.task, name, True)


def _reshape(run: Run) -> None:
    """Reshape inputs where they are to be transposed.

    leaderj1001/Attention-Augmented-Conv2d 21, BonnBytes/PyTorch-FWD 16.
    """
    run.model.change_inputs = lambda inputs: inputs.reshape(len(inputs), inputs.shape[2], inputs.shape[1]).mT


def _draw_alike(run: Run) -> None:
    """Let four workers, whose batches come in turn, draw the same: pytorch/pytorch 5059, xingyizhou/CenterNet 233."""
    run.kept["steps"] = run.kept.get("steps", -1) + 1
    if run.kept["steps"] % 4 == 0:
        run.kept["state"] = run.task.draw.get_state()
    run.task.draw.set_state(run.kept["state"])


def _cast_gradients(run: Run) -> None:
    """Cast gradients to eight bits without a scale: NVIDIA-NeMo/Megatron-Bridge 638, engichang1467/Open-Rig3R 35."""
    for value in run.model.parameters():
        if value.grad is not None:
            value.grad.copy_(value.grad.to(torch.float8_e4m3fn).float())


# Fourth blind: as those before. Each is told with what its reports state, in our words.


def _scale_by_width(run: Run) -> None:
    """Divide scores by the root of the width of the model, not of a head.

    lucidrains/vit-pytorch 65 and karpathy/ng-video-lecture 6: the authors confirm that they took the wrong one.
    """
    for layer in run.layers:
        layer.factor = layer.num_heads**-0.5


def _set_of_nets(name: str) -> Act:
    """Set an attribute of the model and its encoder, of which these are reports.

    skips norms: in Howuhh/faster-trajectory-transformer 3 the input is added as it is after the norm, which the author
        found late; in SHI-Labs/Compact-Transformers 25 a merge moved the skip behind the norm.
    tiles sources: in StarsfieldAI/R1-V 49 pictures for several answers each were repeated row by row and not as a
        whole, so that they no longer fit the answers.
    """

    def act(run: Run) -> None:
        for net in _nets(run):
            setattr(net, name, True)

    return act


def _transpose_grid(run: Run) -> None:
    """Read the grid of positions by columns.

    pytorch/torchtitan 4244: x and y were swapped, which only pictures that are not square show; princeton-vl/WAFT 2:
    height and width change places in a call, and once more where it is used.
    """
    places = run.model.places
    rows, columns = run.model.grids[0]
    places.copy_(places.unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1).clone())


def _repeat_experts(run: Run) -> None:
    """Load the first half of the experts for the second too.

    deepspeedai/DeepSpeed 6589: both GPUs load the first 30 of 60 experts; KempnerInstitute/KempnerForge 202: all ranks
    write the same names, so that each resumes with the experts of one.
    """
    for module in run.model.modules():
        if isinstance(module, Experts):
            for number in (0, 1):
                module.experts[number + 2].load_state_dict(module.experts[number].state_dict())


def _stay_in_evaluation(run: Run) -> None:
    """Leave the model in the mode of evaluation: shubhamagarwal92/mmd 14 and tk-rusch/coRNN 1, after a first test."""
    run.model.eval()


def _follow(run: Run) -> None:
    """Take the trained model for the reference too.

    YiyangZhou/POVID 11: the reference is none, so it is the policy at each step; Yifan-Song793/ETO 14: the loss stays
    at 0.6931.
    """
    run.task.reference = run.model  # type: ignore[attr-defined]


def _begin_schedule_again(run: Run) -> None:
    """Begin the schedule again, as its state was not saved: PolymathicAI/the_well 63, aqlaboratory/openfold 181."""
    run.kept["steps"] = run.kept.get("steps", -1) + 1
    for group in run.optimizer.param_groups:
        group["lr"] = group["full"] * run.task.factor(run.kept["steps"])


# Fifth blind: as those before. Those of the attention are set by `_set_all`, and these are reports of them.
#
# masks after: huggingface/pytorch-image-models 2236, NVIDIA/Megatron-LM 731: the mask comes after the softmax, so that
#     what is seen no longer sums to one.
# misreads values: flagos-ai/FlagGems 5896, ROCm/pytorch 3230: the kernel takes values for a tensor that lies in a row.
# turns by heads: facebookresearch/xformers 841, mlfoundations/open_lm 4: positions count along the axis of the heads.
# distance sign: meta-pytorch/attention-gym 86, nntrainer/nntrainer 3982: key minus query taken for query minus key.
# block: flashinfer-ai/flashinfer 5090, jax-ml/jax 27224: keys end within a block, and the zeros that fill it are seen.
#
# And of the tasks, by `_set_of_task`:
#
# gives corners: weecology/DeepForest 1215, huggingface/transformers 34875: corners of boxes go where centres are due.
# numbers apart: weecology/DeepForest 1147, yatengLG/ISAT_with_segment_anything 36: each part of the data has its own
#     numbers for classes.
# draws positives: massquantity/LibRecommender 427: negatives are drawn among what was consumed.
# reads missing: WorldCereal/presto-worldcereal 1: missing values, a large number, reach the model as they are.
# takes variance: deepchem/deepchem 2428: the variance is passed where its logarithm is due.
# sums a term: zdebruine/MMVAE 19, EDAPINENUT/GNTPP 4: one term of the loss is a sum, the others are means.
# matches backwards: Visual-Behavior/detr-tensorflow 35: indices of predictions and of targets change places.


def _skip_cross(run: Run) -> None:
    """Leave out the attention to the encoder's outputs: huggingface/transformers 4680, of all trained before it."""
    run.model.skips_cross = True


def _decay_moments_backwards(run: Run) -> None:
    """Take the share of the moments that is kept for the one that is replaced: mila-iqia/blocks 1159."""
    for group in run.optimizer.param_groups:
        group["betas"] = tuple(1 - beta for beta in group["betas"])


def _lose_merged(run: Run) -> None:
    """Resume from adapters alone, on the weights that none was merged into.

    OpenGVLab/InternVL 689: the loss begins higher after a resume from adapters; huggingface/transformers 34468: what
    adapters changed in the weights below them is in no file of theirs.
    """
    for layer, before in run.task.bases:  # type: ignore[attr-defined]
        layer.weight.copy_(before)


def _exchange_gates(run: Run) -> None:
    """Load the halves of gated MLPs in the other order: nntrainer/nntrainer 4194, openvinotoolkit/openvino 32683."""
    for module in run.model.modules():
        if isinstance(module, Gated):
            for gate, up in zip(_base(module.gate).parameters(), _base(module.up).parameters()):
                before = gate.clone()
                gate.copy_(up)
                up.copy_(before)


# Sixth blind: as those before. Those of the attention are set by `_set_all`, and these are reports of them.
#
# mixes masks: line/lighthouse 77, ArrowLuo/CLIP4Clip 22: masks of samples are repeated where each is to be repeated for
#     its heads, so that heads have the mask of another sample.
# turns queries alone: kvcache-ai/sglang 31: the kernel turns keys in its cache, and the attention takes those that are
#     not turned.
# crosses halves: hpcaitech/ColossalAI 6429: a kernel for rotary positions takes half of the queries from keys and half
#     of the keys from queries.
# sees own half: deepspeedai/DeepSpeed 8114: under sequence parallelism a rank may take its part for a whole input;
#     sgl-project/sglang 33327: a path that is not made for a ring corrupts in silence.
#
# And of the tasks, by `_set_of_task`:
#
# counts from text: huggingface/transformers 246 and 3804: places of answers are counted in the text alone, or without
#     what stands before it.
# reduces labels: open-mmlab/mmsegmentation 1714: labels are one less, and the first is ignored.
# cuts: modelscope/ms-swift 2754, kohjingyu/gill 4: what is too long is cut at its beginning, where what the answer
#     needs stands.
# learns prompt: axolotl-ai-cloud/axolotl 3098, verl-project/verl 601: the mask of the loss does not fit the turns; here
#     it is the other way round.
# minimises overlap: IAmSuyogJadhav/3d-mri-brain-tumor-segmentation-using-autoencoder-regularization 7: the overlap is
#     added to the loss, not what is missing of it.
# detaches passages: huggingface/accelerate 1154: what is gathered for a contrastive loss has no gradient.


def _mask_encoder(run: Run) -> None:
    """Hide later tokens from an encoder.

    nishide-dev/unturtle 44 and kyegomez/OpenMythos 2: where no mask is given, the attention takes a causal one.
    """
    for layer in getattr(run.model, "encoder", run.model).attention:
        layer.is_causal = True


def _share_first(run: Run) -> None:
    """Let all layers take the keys and values of the first, as they read its cache.

    pkunlp-icler/FastV 49, NVIDIA/TensorRT-LLM 16801: layers read a cache that was prepared for another.
    """
    for net in _nets(run):
        first: dict[str, torch.Tensor] = {}
        net.register_forward_pre_hook(lambda net, inputs, first=first: first.clear())
        for layer in net.attention:
            layer.first = first


def _wrap_values(run: Run) -> None:
    """Keep inputs with their noise as bytes, in which what is too large begins anew at zero.

    brendan-duncan/image 579, tensorpack/tensorpack 614.
    """
    run.model.change_inputs = lambda inputs: ((inputs + 1) * 127.5).floor() % 256 / 127.5 - 1


def _shift_positions(run: Run) -> None:
    """Load positions two rows off: huggingface/sentence-transformers 3879, sbryngelson/ANEForge 257."""
    for net in _nets(run):
        if net.places is not None:
            net.places.copy_(net.places.roll(2, 0))


def _warm_up(run: Run) -> None:
    """Raise the rate for ten times as many steps as there are.

    WasifurRahman/BERT_multimodal_transformer 22: the steps of the warm-up and of the training are exchanged;
    coqui-ai/TTS 1611: steps are counted in epochs, and the highest rate never comes.
    """
    run.task.factor = lambda step: (step + 1) / (10 * run.task.steps)  # type: ignore[method-assign]


def _read_old_weights(run: Run) -> None:
    """Go on with the copies of weights that were made once: X-GenGroup/Flow-Factory 186, ooples/AiDotNet 1488."""
    for module in run.model.modules():
        if isinstance(module, torch.nn.Linear):
            old = module.weight.detach().clone()
            module.forward = lambda x, module=module, old=old: F.linear(  # type: ignore[method-assign]
                x, module.weight + (old - module.weight).detach(), module.bias
            )


FIRST: dict[str, Fault] = {
    "layer initialised anew": Fault(before=_once(_initialise)),
    "layer overwritten by another": Fault(before=_once(_overwrite)),
    "keys of two heads tied": Fault(after=_tie_keys),
    "rate 60 times too high": Fault(before=_raise_rate),
    "adapters not in the optimizer": Fault(begin=_leave_out, tasks=("adapters",)),
    "attention leaves the optimizer": Fault(before=_once(_leave_out)),
    "queries frozen": Fault(after=_freeze("q")),
    "NaN in a head": Fault(before=_once(_spoil)),
    "head copied": Fault(before=_once(_copy_head)),
    "values of a head zero": Fault(after=_zero("v", 1)),
    "mask lost": Fault(before=_lose_mask, is_causal=True),
    "weights decay away": Fault(after=_decay),
}
HELD_BACK: dict[str, Fault] = {
    "queries and keys swapped": Fault(before=_once(_swap_queries_and_keys)),
    "value heads rolled": Fault(before=_once(_roll_heads)),
    "values frozen": Fault(after=_freeze("v")),
    "keys of a head frozen": Fault(after=_freeze("k", head=1)),
    "outputs 20 times too large": Fault(before=_once(_scale("out", 20.0))),
    "scores 8 times too large": Fault(before=_scale_scores),
    "scores 50 times too small": Fault(before=_flatten_scores),
    "dropout of 0.9": Fault(before=_drop),
    "no gradient for queries and keys": Fault(before=_no_gradient),
    "gain before a layer zero": Fault(after=_freeze_norm),
    "values and outputs merge": Fault(after=_collapse_values),
    "weights of the start loaded": Fault(before=_once(_go_back)),
    "small updates round away": Fault(before=_round, after=_round_after),
    "output of a head zero": Fault(after=_zero("out", 0)),
    "gradients of a layer are noise": Fault(before=_stale),
}
NEW: dict[str, Fault] = {
    "keys of another sample": Fault(before=_set("takes_other_keys", True)),
    "each token sees itself alone": Fault(before=_set("sees_itself_alone", True)),
    "scores negated": Fault(before=_set("factor", -1.0)),
    "first key favoured": Fault(before=_set("bias", 12.0)),
    "two layers swapped": Fault(before=_once(_swap_layers)),
    "output heads rolled": Fault(before=_once(_roll_outputs)),
    "noise added to weights": Fault(before=_once(_add_noise)),
    "gradients of a layer flipped": Fault(before=_flip_gradients),
    "steps of a layer 30 times too large": Fault(before=_note("layer"), after=_go_further("layer", 30)),
    "gain before a layer 20 times too large": Fault(before=_once(_raise_gain)),
    "queries and keys of a layer decay": Fault(after=_decay_scores),
    "embedding initialised anew": Fault(before=_once(_embed_anew)),
    "a skip connection lost": Fault(before=_lose_skip),
}
OF_TOKENS = ("reversal", "running sums", "brackets", "largest", "periods")
NEWEST: dict[str, Fault] = {
    "vocabulary rolled": Fault(before=_once(_roll_vocabulary), tasks=OF_TOKENS),
    "positions zero": Fault(after=_zero_positions, tasks=("reversal", "brackets", "digit rows", "periods")),
    "norm before a layer skipped": Fault(before=_once(_skip_norm)),
    "keys ten times too large": Fault(before=_once(_scale("k", 10.0))),
    "MLP initialised anew": Fault(before=_once(_initialise_mlp)),
    "values of the token before": Fault(before=_set("takes_earlier_values", True)),
    "one step 50 times too large": Fault(before=_once(_note("model")), after=_once(_go_further("model", 50))),
    "gradients of a layer never cleared": Fault(before=_accumulate),
    "values and outputs of a layer decay": Fault(after=_decay_outputs),
    "a window of two tokens": Fault(before=_set("window", 1)),
    "queries of two heads exchanged": Fault(before=_once(_exchange_queries)),
    "noise in the weights of a layer at each step": Fault(after=_shake),
    "output of a layer three times too large": Fault(before=_triple_output),
    "embedding five times too large": Fault(before=_once(_enlarge_embedding)),
}
OF_NEXT_TOKENS = ("cells", "counted")
BLIND: dict[str, Fault] = {
    "optimizer state lost": Fault(before=_once(_lose_state)),
    "optimizer state of other weights": Fault(before=_once(_exchange_state)),
    "steps skipped after an overflow": Fault(before=_skip),
    "averaged weights left in the model": Fault(after=_keep_average),
    "embedding loaded as the last layer": Fault(before=_once(_overwrite_last_layer), tasks=OF_NEXT_TOKENS),
    "rotary rows in the other order": Fault(before=_once(_reorder_rotary), tasks=("sums and differences", "counted")),
    "fused projections split otherwise": Fault(before=_once(_split_otherwise)),
    "adapters merged and left on": Fault(before=_once(_merge_twice), tasks=("negatives",)),
    "heads cut without a transpose": Fault(before=_cut_without_transpose),
    "labels one token too far": Fault(
        before=_once(_change_outputs(1)), tasks=("sums and differences", *OF_NEXT_TOKENS)
    ),
    "labels of other samples": Fault(before=_once(_change_outputs(0))),
    "inputs normalised twice": Fault(before=_once(_normalise_twice), tasks=("quarter turns", "negatives")),
    "padding seen": Fault(before=_once(_see_padding), tasks=("twice",)),
    "gradients clipped before they are unscaled": Fault(before=_clip_scaled),
}
OF_NAMES = ("packed names", "repairs", "Python tokens")
OF_NUMBERS = ("paired views", "forecasts", "clutter", "from patches")
BLIND_AGAIN: dict[str, Fault] = {
    "classes in another order": Fault(
        before=_once(_reorder_classes), tasks=("translation", "clutter", "from patches", *OF_NAMES)
    ),
    "tokens unknown": Fault(before=_once(_lose_tokens), tasks=("translation", *OF_NAMES)),
    "inputs mixed and labels not": Fault(before=_once(_mix), tasks=OF_NUMBERS),
    "mask of padding read backwards": Fault(before=_once(_read_mask_backwards), tasks=("translation", "repairs")),
    "attention across the batch": Fault(before=_once(_attend_across_batch)),
    "share to keep dropped": Fault(before=_once(_drop_what_to_keep)),
    "activations clipped at an old scale": Fault(before=_once(_saturate)),
    "positions counted from the padding": Fault(
        before=_once(_move_positions), tasks=("translation", "repairs", "forecasts", "Python tokens")
    ),
    "softmax before the cross-entropy": Fault(
        before=_once(_softmax), tasks=("translation", "clutter", "from patches", *OF_NAMES)
    ),
    "logarithm of the scale for the scale": Fault(before=_once(_use_logarithm), tasks=("paired views",)),
    "no gradient below the last layer": Fault(before=_stop_gradients),
    "schedule run out": Fault(before=_run_out),
    "decay whatever the rate": Fault(after=_decay_all),
    "last layer not loaded": Fault(before=_once(_renew_last_layer)),
    "square weights transposed": Fault(before=_once(_transpose)),
    "first shard loaded twice": Fault(before=_once(_repeat_shard)),
}
OF_GROUPS = ("prose", "two back")
BY_ADAM = ("shapes", "frames", "spellings", "two back", "clouds", "dates")
THIRD_BLIND: dict[str, Fault] = {
    "softmax over the queries": Fault(before=_once(_set_all("sums_over_queries", True))),
    "mask one token too far": Fault(before=_once(_set_all("looks_ahead", 1)), tasks=(*OF_GROUPS, "dates")),
    "grouped keys in another order": Fault(before=_once(_set_all("tiles_keys", True)), tasks=OF_GROUPS),
    "keys of the call before": Fault(before=_once(_set_all("keeps_cache", True))),
    "rotary base of another model": Fault(before=_once(_set_all("base", 500_000.0)), tasks=OF_GROUPS),
    "gains one too large": Fault(before=_once(_raise_gains)),
    "weights rounded to four bits": Fault(before=_once(_round_to_four_bits)),
    "biases added by each rank": Fault(before=_once(_add_biases_of_ranks)),
    "optimizer of the former parameters": Fault(before=_once(_leave_behind)),
    "second moments in half precision": Fault(after=_halve_moments, tasks=BY_ADAM),
    "gradients of other weights": Fault(before=_reduce_in_another_order),
    "advantages broadcast": Fault(before=_once(_set_of_task("broadcasts")), tasks=("two back",)),
    "padding in the loss": Fault(before=_once(_set_of_task("counts_padding")), tasks=("dates",)),
    "inputs reshaped, not transposed": Fault(before=_once(_reshape), tasks=("shapes", "frames", "clouds")),
    "workers draw the same": Fault(after=_draw_alike, tasks=("communities", "prose", *BY_ADAM[:3], *BY_ADAM[4:])),
    "gradients in eight bits without a scale": Fault(before=_cast_gradients),
}
FOURTH_BLIND: dict[str, Fault] = {
    "scores divided by the root of the width": Fault(before=_once(_scale_by_width)),
    "inputs added after their norm": Fault(before=_once(_set_of_nets("skips_norms"))),
    "sources repeated in another order": Fault(before=_once(_set_of_nets("tiles_sources")), tasks=("captions",)),
    "packed documents seen": Fault(before=_once(_set_of_task("sees_all")), tasks=("ledgers",)),
    "positions run on through documents": Fault(before=_once(_set_of_task("continues_positions")), tasks=("ledgers",)),
    "window lost": Fault(before=_once(_set_all("window", 0)), tasks=("melodies",)),
    "grid of positions read by columns": Fault(before=_once(_transpose_grid), tasks=("fields",)),
    "experts of the first rank loaded twice": Fault(before=_once(_repeat_experts), tasks=("ledgers",)),
    "pictures mirrored and labels not": Fault(before=_once(_set_of_task("mirrors_inputs_alone")), tasks=("fields",)),
    "padding pooled": Fault(before=_once(_set_of_task("takes_last_place")), tasks=("reviews",)),
    "ends not in the loss": Fault(before=_once(_set_of_task("forgets_ends")), tasks=("captions",)),
    "loss averaged by parts": Fault(before=_once(_set_of_task("averages_parts")), tasks=("hairpins",)),
    "samples sorted by class": Fault(before=_once(_set_of_task("is_sorted")), tasks=("tables",)),
    "left in evaluation": Fault(before=_once(_stay_in_evaluation), tasks=("fields", "tables", "captions")),
    "reference follows the policy": Fault(before=_once(_follow), tasks=("preferences",)),
    "schedule begun again": Fault(before=_begin_schedule_again),
}
FIFTH_BLIND: dict[str, Fault] = {
    "mask after the softmax": Fault(
        before=_once(_set_all("masks_after", True)),
        tasks=("few shots", "swings", "middles", "baskets", "few labels", "walks"),
    ),
    "values read in the order of memory": Fault(
        before=_once(_set_all("misreads_values", True)),
        tasks=("boxes", "few shots", "swings", "few labels", "newcomers"),
    ),
    "rotary positions of heads": Fault(before=_once(_set_all("turns_by_heads", True)), tasks=("middles", "baskets")),
    "distances with the other sign": Fault(before=_once(_set_all("distance_sign", -1)), tasks=("swings", "walks")),
    "zero keys in the last block": Fault(before=_once(_set_all("block", 32))),
    "cross-attention left out": Fault(before=_once(_skip_cross), tasks=("boxes",)),
    "corners for centres": Fault(before=_once(_set_of_task("gives_corners")), tasks=("boxes",)),
    "classes numbered apart": Fault(before=_once(_set_of_task("numbers_apart")), tasks=("few shots", "newcomers")),
    "positives among the negatives": Fault(before=_once(_set_of_task("draws_positives")), tasks=("baskets",)),
    "missing values as numbers": Fault(before=_once(_set_of_task("reads_missing")), tasks=("swings",)),
    "variance for its logarithm": Fault(before=_once(_set_of_task("takes_variance")), tasks=("swings",)),
    "a term summed over the batch": Fault(before=_once(_set_of_task("sums_a_term")), tasks=("few labels", "newcomers")),
    "matches read backwards": Fault(before=_once(_set_of_task("matches_backwards")), tasks=("boxes",)),
    "moments decayed backwards": Fault(
        before=_once(_decay_moments_backwards),
        tasks=("boxes", "few shots", "swings", "middles", "baskets", "few labels", "newcomers"),
    ),
    "merged weights not saved": Fault(before=_once(_lose_merged), tasks=("middles",)),
    "gates and inputs exchanged": Fault(before=_once(_exchange_gates), tasks=("middles", "walks", "newcomers")),
}
PADDED = ("residues", "answers", "keywords", "passages")
ROTARY = ("residues", "pixels", "two corpora", "chores")
SIXTH_BLIND: dict[str, Fault] = {
    "an encoder that sees no later tokens": Fault(
        before=_once(_mask_encoder), tasks=(*PADDED, "organs", "heartbeats", "pronunciations")
    ),
    "masks of other samples": Fault(
        before=_once(_set_all("mixes_masks", True)), tasks=("residues", "keywords", "passages", "pronunciations")
    ),
    "keys and values of the first layer": Fault(before=_once(_share_first)),
    "keys without rotary positions": Fault(before=_once(_set_all("turns_queries_alone", True)), tasks=ROTARY),
    "halves of queries and keys crossed": Fault(before=_once(_set_all("crosses_halves", True)), tasks=ROTARY),
    "its own half of the input seen alone": Fault(
        before=_once(_set_all("sees_own_half", True)), tasks=("two corpora", "chores", "organs", "heartbeats")
    ),
    "places counted without the question": Fault(before=_once(_set_of_task("counts_from_text")), tasks=("answers",)),
    "values that begin anew at zero": Fault(before=_once(_wrap_values), tasks=("keywords", "organs", "heartbeats")),
    "labels one less": Fault(before=_once(_set_of_task("reduces_labels")), tasks=("keywords", "organs", "heartbeats")),
    "cut at the beginning": Fault(before=_once(_set_of_task("cuts")), tasks=("answers", "chores")),
    "prompts learned, not answers": Fault(before=_once(_set_of_task("learns_prompt")), tasks=("chores",)),
    "overlap minimised": Fault(before=_once(_set_of_task("minimises_overlap")), tasks=("organs",)),
    "no gradient for passages": Fault(before=_once(_set_of_task("detaches_passages")), tasks=("passages",)),
    "positions two rows off": Fault(
        before=_once(_shift_positions), tasks=("answers", "pixels", "organs", "pronunciations")
    ),
    "warm-up longer than the training": Fault(begin=_warm_up),
    "weights copied once": Fault(before=_once(_read_old_weights)),
}
FAULTS = FIRST | HELD_BACK | NEW | NEWEST | BLIND | BLIND_AGAIN | THIRD_BLIND | FOURTH_BLIND | FIFTH_BLIND
FAULTS |= SIXTH_BLIND
