"""DeepSpeed's sequence-tiled modules run forward and backward once per tile, and tell ZeRO by
``param.ds_grad_is_ready`` with which tile a gradient is complete."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
from harness.model import LEARNING_RATE, Weights, weights_of
from harness.releases import DEEPSPEED, between
from harness.training import REDUCED_AT_STEP, STAGES, full_weights, make_config, make_engine

import ds_unmanaged_gas

LENGTH, WIDTH = 6, 4
BATCH = 2 if between("0.17.4") else 1
TILES = 3
WINDOWS = [[1, 2, 3], [4], [5, 6]]
"""Seeds of the micro-batches."""

HAS_FUSED = between("0.17.4")
KINDS = ["sequence_tiled_compute", "TiledMLP", *(["TiledFusedLogitsLoss"] if HAS_FUSED else [])]
# torch.chunk() makes no more tiles than it needs: of 12 rows, five tiles would have four.
TOO_MANY_TILES = 5
TORCH_CHUNKS = KINDS[1:]

pytestmark = pytest.mark.skipif(
    not between("0.17.0"), reason=f"DeepSpeed {DEEPSPEED} has no tiled compute"
)


def linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x)


class Tiled(torch.nn.Module):
    """Linear in each parameter, with integers for data: exact in binary for some windows."""

    def __init__(self, kind: str, tiles: int) -> None:
        super().__init__()
        self.kind = kind
        self.tiles = tiles
        self.shift = torch.nn.Parameter(torch.zeros(WIDTH))
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = x + self.shift
        if self.kind == "plain":
            return (self.linear(h) * t).sum()
        from deepspeed.runtime.sequence_parallel import ulysses_sp as tiled

        params = list(self.linear.parameters())
        if self.kind == "TiledMLP":
            return (tiled.TiledMLP.apply(linear, self.linear, h, self.tiles, params) * t).sum()
        if self.kind == "sequence_tiled_compute":
            y = tiled.sequence_tiled_compute(
                self.linear.__call__,
                LENGTH,
                self.tiles,
                {"input": h},
                {},
                "input",
                compute_params=params,
                output_unshard_dimension=1,
                output_reduction=None,
            )
            return (y * t).sum()
        assert self.kind == "TiledFusedLogitsLoss"
        return tiled.TiledFusedLogitsLoss.apply(
            lambda module, x, t: (module(x) * t).sum(),
            self.linear,
            h,
            t,
            None,
            self.tiles,
            params,
            "sum",
        )


def tensors(seed: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randint(-1, 3, (BATCH, LENGTH, WIDTH), generator=generator)
    t = torch.randint(0, 2, (BATCH, LENGTH, WIDTH), generator=generator) * 2 - 1
    return {"x": x.float(), "t": t.float()}


def reference(windows: list[list[int]]) -> list[Weights]:
    model = Tiled("plain", 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    history = []
    for window in windows:
        optimizer.zero_grad()
        for seed in window:
            for rank in range(2):
                (model(**tensors(seed, rank)) / 2).backward()
        optimizer.step()
        history.append(weights_of(model))
    return history


def train(
    config: dict[str, Any],
    *,
    kind: str,
    windows: list[list[int]] | None = None,
    tiles: int = TILES,
    **backward: Any,
) -> list[Weights]:
    engine = make_engine(config, model=Tiled(kind, tiles))
    history = []
    for window in windows or WINDOWS:
        for seed in window:
            loss = engine(**tensors(seed, deepspeed.comm.get_rank()))
            engine.backward(loss, **{"scale_wrt_gas": False, **backward})
        engine.step()
        history.append(full_weights(engine))
    engine.destroy()
    return history


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        *(pytest.param(stage, {}, id=str(stage)) for stage in STAGES),
        *(pytest.param(stage, REDUCED_AT_STEP, id=f"{stage}-at step") for stage in (2, 3)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_tiled_modules_accumulate_as_plain_ones(
    ranks: Any, stage: int, options: dict[str, Any], kind: str
) -> None:
    for history in ranks.run(train, config=make_config(stage=stage, **options), kind=kind):
        assert history == reference(WINDOWS)


@pytest.mark.parametrize("kind", KINDS)
def test_stage2_mixes_up_tiles_up_to_0_18_5_control(ranks: Any, kind: str) -> None:
    windows = [[1], [2]]
    config = make_config(stage=2, unmanaged=False)
    for history in ranks.run(train, plugin=False, config=config, kind=kind, windows=windows):
        assert (history == reference(windows)) == between("0.18.6")


def refused(config: dict[str, Any], *, kind: str, tiles: int, scaled: bool) -> list[str]:
    """The error of a backward, and whether dropping its window left anything."""
    engine = make_engine(config, model=Tiled(kind, tiles))
    inputs = tensors(1, deepspeed.comm.get_rank())
    with pytest.raises(ds_unmanaged_gas.WindowArgumentError) as caught:
        engine.backward(engine(**inputs), scale_wrt_gas=scaled)
    with pytest.raises(ds_unmanaged_gas.WindowFailedError):
        engine.step()
    engine.zero_grad()
    engine.step()
    unchanged = full_weights(engine) == weights_of(Tiled("plain", 1))
    engine.destroy()
    return [str(caught.value), "dropped" if unchanged else "something was left"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", TORCH_CHUNKS)
def test_too_few_tiles_are_refused(ranks: Any, stage: int, kind: str) -> None:
    task = {"config": make_config(stage=stage), "kind": kind, "tiles": TOO_MANY_TILES}
    for message, outcome in ranks.run(refused, **task, scaled=False):
        assert "fewer tiles than it was told" in message
        assert outcome == "dropped"


@pytest.mark.parametrize("kind", TORCH_CHUNKS)
def test_too_few_tiles_lose_gradients_control(ranks: Any, kind: str) -> None:
    windows = [[1], [2]]
    config = make_config(stage=2, unmanaged=False)  # stage 3 fails on a CPU
    task = {"config": config, "kind": kind, "windows": windows, "tiles": TOO_MANY_TILES}
    for history in ranks.run(train, plugin=False, **task):
        assert history != reference(windows)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.skipif(not HAS_FUSED, reason="this DeepSpeed has no TiledFusedLogitsLoss")
def test_a_fused_loss_is_not_divided(ranks: Any, stage: int) -> None:
    task = {"kind": "TiledFusedLogitsLoss", "tiles": TILES}
    for message, outcome in ranks.run(
        refused, config=make_config(stage=stage, gas=2), **task, scaled=True
    ):
        assert "is 0.5, not 1" in message
        assert outcome == "dropped"


@pytest.mark.skipif(not HAS_FUSED, reason="this DeepSpeed has no TiledFusedLogitsLoss")
def test_a_fused_loss_is_divided_in_part_control(ranks: Any) -> None:
    """Its input's gradients are divided, those of its parameters are not."""
    config = make_config(stage=1, gas=2, unmanaged=False)
    task = {"config": config, "windows": [[1], [2]], "scale_wrt_gas": True}
    fused = ranks.run(train, plugin=False, kind="TiledFusedLogitsLoss", **task)
    plain = ranks.run(train, plugin=False, kind="plain", **task)
    assert fused != plain
