"""A model whose gradients are exact in binary, and plain PyTorch to compare with.

Every head is linear and every loss is linear in the head's output, so a gradient depends on the
data only; the data are small integers. All sums, means over two ranks and SGD updates with a
learning rate of 1/8 are then exact in fp32, and the gradients themselves in bf16 and fp16 too:
tests compare with ``==``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

LEARNING_RATE = 0.125

MicroBatch = Mapping[str, int]
"""Which heads take part, and the seed of each one's data. ``{}`` is a backward of a zero loss."""

Window = Sequence[MicroBatch]
"""The micro-batches of one step()."""

MIXED_WINDOWS: Sequence[Window] = [
    [{"a": 1, "b": 1}, {"a": 2, "b": 2}, {"b": 3}],
    [{"a": 4}],
    [{"b": 5}, {"a": 6, "b": 6}],
    [],
    [{"b": 7}, {"b": 8}],
    [{"a": 9, "b": 9}],
]
"""Both heads, each alone, none at all: what is left of an earlier window shows."""

Weights = dict[str, list[Any]]
"""Parameter name -> values as nested lists, which compare exactly and travel between processes."""

_IN_FEATURES = {"a": 4, "b": 6}
_OUT_FEATURES = 4
_BATCH = 2


class Heads(torch.nn.Module):
    """Two independent heads of different size. The forward pass returns the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in _IN_FEATURES.items():
            self.add_module(name, torch.nn.Linear(size, _OUT_FEATURES))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, batch: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        losses = [(getattr(self, name)(x) * t).sum() for name, (x, t) in batch.items()]
        return torch.stack(losses).sum()


def tensors(
    micro_batch: MicroBatch, rank: int, dtype: torch.dtype, device: Any = "cpu"
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The inputs and loss weights of each head: integers, different on each rank."""
    batch = {}
    for name, seed in micro_batch.items():
        generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + ord(name))
        x = torch.randint(-1, 3, (_BATCH, _IN_FEATURES[name]), generator=generator)
        t = torch.randint(0, 2, (_BATCH, _OUT_FEATURES), generator=generator) * 2 - 1
        batch[name] = (x.to(device, dtype), t.to(device, dtype))
    return batch


def reference(
    windows_by_rank: Sequence[Sequence[Window]],
    *,
    make_model: Any = Heads,
    make_optimizer: Any = None,
    loss_scale: float = 1.0,
) -> list[Weights]:
    """Plain PyTorch: after each window, one step of a torch optimizer on the mean over ranks of the
    summed gradients. ``windows_by_rank[rank]`` is what that rank does. A parameter without any
    gradient has a gradient of zero. Returns the weights after each window."""
    model = make_model()
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=LEARNING_RATE))
    optimizer = make_optimizer(model.parameters())
    history = []
    for windows in zip(*windows_by_rank, strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank, window in enumerate(windows):
            for micro_batch in window:
                if micro_batch:
                    (model(tensors(micro_batch, rank, torch.float32)) * loss_scale).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(windows_by_rank)
        optimizer.step()
        history.append(weights_of(model))
    return history


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: p.detach().float().tolist() for name, p in model.named_parameters()}


def same_on_all_ranks(windows: Sequence[Window], world_size: int = 2) -> list[Sequence[Window]]:
    return [windows] * world_size


class Layers(torch.nn.Module):
    """``num`` linear layers of ``size`` x ``size``, of which each gets the same input."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.size = size
        layers = (torch.nn.Linear(size, size, bias=False) for _ in range(num))
        self.layers = torch.nn.ModuleList(layers)

    def batch(self) -> torch.Tensor:
        return torch.ones(1, self.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers]).sum()
