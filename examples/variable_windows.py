"""Train a small GPT-style model whose optimizer steps are decided by a client, not by a counter.

A simulated client sends requests of 1 to 8 micro-batches with unequal numbers of tokens, and calls
step() whenever it has seen enough tokens: how many backwards a step has is known only then. The
same windows are then trained by plain PyTorch, and the two runs compared.

    python examples/variable_windows.py --stage 2 --ranks 2

Writes a picture of both loss curves. Exits with 1 if the runs disagree.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

CONTEXT = 64
WIDTH = 96
LAYERS = 3
HEADS = 4

SEQUENCES = 4
"""Sequences per micro-batch and rank."""

TOKENS_PER_STEP = 2500
"""What the client aims at on average; the loss is divided by it, the real number being unknown."""

TOLERANCE = 1e-5
"""Largest accepted difference of a weight.

The two runs add the same fp32 gradients in different orders (2**-24 relative each); AdamW divides
by the square root of a running mean of squares, which enlarges that for weights whose gradients
are near zero. A lost or doubled micro-batch changes weights by about the learning rate per step, a
hundred times this tolerance.
"""

LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


class CharacterModel(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The sum of the cross-entropies of every next token, a scalar."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)
        hidden = self.blocks(self.token(inputs) + self.position(positions))
        logits = self.head(self.norm(hidden)).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def load_text() -> tuple[torch.Tensor, int]:
    """The language reference that ships with Python, as character ids."""
    text = "\n".join(pydoc_data.topics.topics.values())
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    return torch.tensor([index[character] for character in text]), len(characters)


def client(steps: int) -> Iterator[list[list[tuple[int, int]]]]:
    """The windows: for each step() the requests before it, each a list of micro-batches, given as
    (seed, tokens per sequence)."""
    dice = random.Random(0)
    for _ in range(steps):
        window: list[list[tuple[int, int]]] = []
        wanted = dice.randint(1, 2 * TOKENS_PER_STEP)
        sent = 0
        while sent < wanted:
            request = [
                (dice.getrandbits(30), dice.randint(16, CONTEXT)) for _ in range(dice.randint(1, 8))
            ]
            sent += sum(SEQUENCES * length for _, length in request)
            window.append(request)
        yield window


def cut(text: torch.Tensor, micro_batch: tuple[int, int], rank: int) -> torch.Tensor:
    """This rank's sequences of a micro-batch: shape (SEQUENCES, tokens + 1)."""
    seed, length = micro_batch
    generator = torch.Generator().manual_seed(seed + rank)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (SEQUENCES,), generator=generator)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()])


def make_model(vocabulary: int) -> CharacterModel:
    torch.manual_seed(0)
    return CharacterModel(vocabulary)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-6)


def train_with_deepspeed(rank: int, options: argparse.Namespace, folder: str) -> None:
    """One rank. Rank 0 saves the losses and the final weights in ``folder``."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options.ranks),
        LOCAL_SIZE=str(options.ranks),
    )
    log = os.open(Path(folder, f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    if rank:
        os.dup2(log, 2)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger, safe_get_full_fp32_param

    import ds_unmanaged_gas

    logger.setLevel("ERROR")
    if get_accelerator().device_name() == "cpu":
        torch.set_num_threads(1)
        # An optional op that takes a minute to build; gloo does without it.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]

    ds_unmanaged_gas.enable()
    deepspeed.init_distributed(
        get_accelerator().communication_backend_name() or "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=options.ranks,
        auto_mpi_discovery=False,
    )
    text, vocabulary = load_text()
    model = make_model(vocabulary)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": options.stage, "reduce_bucket_size": 1_000_000},
            "managed_gradient_accumulation": False,
        },
    )
    losses, backwards = [], []
    for window in tqdm(
        client(options.steps), total=options.steps, desc="DeepSpeed", disable=rank > 0
    ):
        total, tokens = 0.0, 0
        for request in window:
            for micro_batch in request:
                batch = cut(text, micro_batch, rank).to(engine.device)
                loss = engine(batch)
                engine.backward(loss / TOKENS_PER_STEP, scale_wrt_gas=False)
                total += float(loss.detach())
                tokens += SEQUENCES * micro_batch[1]
        engine.step()
        losses.append(total / tokens)
        backwards.append(sum(len(request) for request in window))
    mean = torch.tensor(losses, device=engine.device)
    deepspeed.comm.all_reduce(mean)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        full = safe_get_full_fp32_param(parameter) if options.stage else parameter.detach()
        weights[name] = full.cpu()
    if rank == 0:
        report = {
            "losses": (mean / options.ranks).tolist(),
            "weights": weights,
            "backwards": backwards,
            "samples": engine.global_samples,
        }
        torch.save(report, Path(folder, "deepspeed.pt"))
    deepspeed.comm.barrier()


def train_with_pytorch(options: argparse.Namespace) -> dict[str, Any]:
    """The same windows without DeepSpeed: the mean over ranks of the summed gradients."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, vocabulary = load_text()
    model = make_model(vocabulary).to(device)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for window in tqdm(client(options.steps), total=options.steps, desc="PyTorch  "):
        total, tokens = 0.0, 0
        for micro_batch in (m for request in window for m in request):
            for rank in range(options.ranks):
                loss = model(cut(text, micro_batch, rank).to(device))
                (loss / TOKENS_PER_STEP / options.ranks).backward()
                total += float(loss.detach())
                tokens += SEQUENCES * micro_batch[1]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / tokens)
    weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights}


def draw(ours: dict[str, Any], theirs: dict[str, Any], stage: int, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    steps = range(1, len(ours["losses"]) + 1)
    top.plot(steps, theirs["losses"], linewidth=5, alpha=0.35, label="plain PyTorch")
    top.plot(steps, ours["losses"], color="black", linewidth=1, label=f"DeepSpeed ZeRO-{stage}")
    top.set_ylabel("loss per token")
    top.set_title("The same client-decided windows, trained twice")
    top.legend()
    bottom.bar(steps, ours["backwards"], color="tab:gray")
    bottom.set_ylabel("backwards")
    bottom.set_xlabel("step()")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="ZeRO stage")
    parser.add_argument("--ranks", type=int, help="processes; default: GPUs, or 2 without one")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--output", type=Path, default=Path("variable_windows.png"))
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    options.ranks = options.ranks or gpus or 2
    if options.ranks > gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            train_with_deepspeed, args=(options, folder), nprocs=options.ranks
        )
        ours = torch.load(Path(folder, "deepspeed.pt"))
    theirs = train_with_pytorch(options)

    differences = {
        name: float((weight - theirs["weights"][name]).abs().max())
        for name, weight in ours["weights"].items()
    }
    worst = max(differences, key=lambda name: differences[name])
    in_loss = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    draw(ours, theirs, options.stage, options.output)
    counts = ours["backwards"]
    print(f"{options.steps} steps, {min(counts)} to {max(counts)} backwards each")
    print(f"loss per token: {ours['losses'][0]:.4f} -> {ours['losses'][-1]:.4f}")
    print(f"samples counted by the engine: {ours['samples']}")
    print(f"largest difference from plain PyTorch: weights {differences[worst]:.2e} ({worst}),")
    print(f"  loss per token {in_loss:.2e}; tolerance {TOLERANCE:.0e}")
    print(f"loss curves: {options.output}")
    expected = sum(counts) * SEQUENCES * options.ranks
    agree = differences[worst] <= TOLERANCE and in_loss <= TOLERANCE and ours["samples"] == expected
    print("the two runs agree" if agree else "THE TWO RUNS DISAGREE")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
