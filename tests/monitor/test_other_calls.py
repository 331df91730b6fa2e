"""Calls that others make of a watched model, parts that leave it, and what a loss keeps: the training is as without."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import watch_heads


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.maps, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        query, key, value = self.maps(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x, again=0):
        out = x
        for block in self.blocks:
            out = block(out)
        return out + self(x, again - 1) if again else out


def trained(tmp_path, step, *, watches, steps=8):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, stacks = [], []
    with watch_heads(model, optimizer, 1 if watches else 10**6, log_dir=tmp_path, history=False) as heads:
        if not watches:
            heads.close()
        for at in range(steps):
            with heads.step():
                optimizer.zero_grad()
                loss = step(model, torch.randn(2, 5, 16), at)
                if loss is not None:
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
            stacks.append(torch._C._len_torch_dispatch_stack())
        return losses, [*model.parameters()], stacks, heads


def in_a_thread_within(model, x, at):
    def act():
        with torch.no_grad():
            model(x[:1])

    def start(*_):
        hook.remove()
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    hook = model.blocks[1].register_forward_pre_hook(start)
    return model(x).square().mean()


def within_itself(model, x, at):
    return model(x, again=1).square().mean()


def interrupted(model, x, at):
    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.blocks[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(x)
    hook.remove()
    return None if at % 2 else model(x).square().mean()


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx._saved_dim = "anything"
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def a_function_that_keeps_things(model, x, at):
    return Kept.apply(model(x)).mean()


@pytest.mark.parametrize("step", [in_a_thread_within, within_itself, interrupted, a_function_that_keeps_things])
def test_a_model_is_watched_and_trained_as_without(step, tmp_path, recwarn):
    losses, weights, stacks, _ = trained(tmp_path, step, watches=False)
    watched, weights_watched, stacks_watched, heads = trained(tmp_path, step, watches=True)
    assert all(map(torch.equal, losses, watched))
    assert all(map(torch.equal, weights, weights_watched))
    assert stacks == stacks_watched
    assert not [str(each.message) for each in recwarn if "failed" in str(each.message)]
    assert heads.latest["hdi/mean"] > 0


def test_tensors_that_a_loss_saves_are_unpacked_no_more_often(tmp_path):
    def counting(watches):
        count = 0

        def unpack(tensor):
            nonlocal count
            count += 1
            return tensor

        def step(model, x, at):
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                loss = model(x).clamp(min=torch.tensor(-9.0)).square().pow(torch.tensor(1.0)).mean()
            loss.backward(retain_graph=True)
            return loss

        trained(tmp_path, step, watches=watches)
        return count

    assert counting(True) == counting(False)


def test_a_layer_that_leaves_the_model_is_named_and_the_others_are_read(tmp_path):
    def step(model, x, at):
        if at == 3:
            del model.blocks[1]
        return model(x).square().mean()

    with pytest.warns(match="Not watched any more: `blocks.1`: its module is not where it was found; `blocks.2`"):
        *_, heads = trained(tmp_path, step, watches=True)
    assert [layer.name for layer in heads.monitor.layers] == ["blocks.0"]
    assert [refusal.name for refusal in heads.monitor.refused] == ["blocks.1", "blocks.2"]
    assert not heads._session.latest.absent


def test_that_all_layers_have_left_their_places_is_one_warning(tmp_path, recwarn):
    def step(model, x, at):
        if at == 3:
            del model.blocks[0]
        return model(x).square().mean()

    *_, heads = trained(tmp_path, step, watches=True)
    (told,) = [str(each.message) for each in recwarn if "hdi_callback" in each.category.__module__]
    assert told.startswith("Not watched any more: `blocks.0`")
    assert heads._session.latest.step == 2
