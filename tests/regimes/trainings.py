"""Trainings under Lightning that the tests of regimes share: what is trained, and what is kept of it."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.errors import HDIWarning
from tests import trainers
from tests.models import HEADS, Block, Classifier

PATIENCE = 180  # seconds, until a process counts as hanging


class Module(L.LightningModule):
    """A network under automatic optimization, with nothing in its steps that a compiler could not trace."""

    def __init__(self, net: nn.Module | None = None, *, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Classifier(dropout=dropout) if net is None else net

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        return F.cross_entropy(self.net(tokens).float(), label)

    def validation_step(self, batch, batch_idx):
        tokens, label = batch
        F.cross_entropy(self.net(tokens).float(), label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4)  # the usual one is 0 in float16


def trainer_for(folder: Path, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Make a trainer that validates after training alone, so that every forward of its first epoch is one of it."""
    return trainers.trainer_for(folder, *callbacks, **{"num_sanity_val_steps": 0, **options})


class Losses(L.Callback):
    """Keeps the loss of every batch, as it was."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def on_train_batch_end(self, trainer, module, outputs, *args):
        if outputs is not None:
            self.recorded.append(outputs["loss"].detach().clone())


class Witness(L.Callback):
    """Keeps, by hooks of its own, what every projection received and the weights at the start of each batch.

    It must be the first of the callbacks. Of several forwards within a batch all are kept.
    """

    def __init__(self) -> None:
        self.weights: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.inputs: dict[int, list[list[Tensor]]] = {}
        self._step = -1

    def on_fit_start(self, trainer, module):
        for place, block in enumerate(self._blocks(module)):
            block.attn.out_proj.register_forward_pre_hook(
                lambda _, args, place=place: (
                    self.inputs[self._step][place].append(args[0].detach().clone())
                    if self._step in self.inputs
                    else None
                )
            )

    def on_train_batch_start(self, trainer, module, *args):
        if trainer.global_step in self.inputs:  # a further batch of the same optimizer step
            self._step = -1
            return
        self._step = trainer.global_step
        self._keep(self._step, module)
        self.inputs[self._step] = [[] for _ in self._blocks(module)]

    def on_train_batch_end(self, trainer, module, *args):
        self._step = -1

    def on_train_epoch_end(self, trainer, module):
        self._keep(trainer.global_step, module)

    def _keep(self, step: int, module: nn.Module) -> None:
        # Of two times at one step the first counts: weights that change without a step are not those that train.
        self.weights.setdefault(
            step,
            [
                tuple(part.weight.detach().double().clone() for part in (block.attn.k_proj, block.attn.out_proj))
                for block in self._blocks(module)
            ],
        )

    @staticmethod
    def _blocks(module: nn.Module) -> list[Block]:
        return [part for part in module.modules() if isinstance(part, Block)]

    def hdi(self, step: int, place: int) -> float:
        """One less the mean overlap of the key subspaces, by their orthogonal projections."""
        keys = self.weights[step][place][0].unflatten(0, (HEADS, -1))
        projections = torch.stack([torch.linalg.pinv(key) @ key for key in keys])
        ranks = projections.diagonal(dim1=-2, dim2=-1).sum(-1)
        overlaps = torch.einsum("hij,gij->hg", projections, projections) / (ranks[:, None] * ranks).sqrt()
        return 1 - float(_off_diagonal(overlaps))

    def covariance(self, step: int, place: int) -> float:
        """The mean, over pairs of heads, of the summed covariances of what they add to the output."""
        outputs = self.inputs[step][place][0].double().flatten(0, 1).unflatten(-1, (HEADS, -1))
        weight = self.weights[step][place][1].T.unflatten(0, (HEADS, -1))
        added = torch.einsum("thk,hkd->htd", outputs, weight)
        added = added - added.mean(1, keepdim=True)
        return float(_off_diagonal(torch.einsum("htd,gtd->hg", added, added) / added.shape[1]))


def _off_diagonal(matrix: Tensor) -> Tensor:
    count = matrix.shape[0]
    return (matrix.sum() - matrix.trace()) / (count * (count - 1))


def in_a_process(function: Callable[..., None], *args: Any) -> int:
    """Call a function of a module in a process of its own, forked from one that has imported everything before.

    Returns:
        How the process ended: 0 if all is well, less a signal's number if that ended it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.regimes.killed_run"])  # before the first process of any test
    process = context.Process(target=function, args=args)
    process.start()
    process.join(PATIENCE)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{function.__name__}{args} hangs")
    return process.exitcode


@contextmanager
def reported() -> Iterator[list[str]]:
    """Collect the warnings of the package, which are errors elsewhere in the tests."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(item.message) for item in caught if issubclass(item.category, HDIWarning)]
