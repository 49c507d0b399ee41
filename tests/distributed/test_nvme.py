"""Optimizer states and parameters on NVMe: a local folder, through DeepSpeed's real async_io op."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.pool import RankPool
from harness.releases import DEEPSPEED
from harness.training import make_config, make_engine
from packaging.version import Version

pytestmark = [
    pytest.mark.skipif(
        ctypes.util.find_library("aio") is None,
        reason="DeepSpeed's async_io op needs libaio (Debian: libaio-dev)",
    ),
    pytest.mark.skipif(
        Version("0.19.4") > DEEPSPEED,
        reason="stock DeepSpeed 0.18.4 and 0.19.3 abort while they build the engine, managed too: "
        "deepspeed_py_io_handle.cpp, wait(), assertion _num_pending_ops > 0",
    ),
]

# A partition of fewer bytes than this is not swapped.
MIN_SWAPPED_BYTES = 2**20
ROWS, COLUMNS = 2048, 512


class BigHeads(torch.nn.Module):
    """Two heads whose halves are large enough to be swapped, and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.b = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        self.small = torch.nn.Linear(COLUMNS, 4, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, batch: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        return torch.stack([(getattr(self, n)(x) * t).sum() for n, (x, t) in batch.items()]).sum()


def batch(heads: str, seed: int, rank: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    names = {"a": "a", "b": "b", "s": "small"}
    result = {}
    for head in heads:
        rows = 4 if head == "s" else ROWS
        x = torch.randint(-1, 3, (1, COLUMNS), generator=generator)
        t = torch.randint(0, 2, (1, rows), generator=generator) * 2 - 1
        result[names[head]] = (x.to(dtype), t.to(dtype))
    return result


WINDOWS = [["abs", "abs"], ["a", "abs", "b"], ["as"], ["b"], [], ["abs"], ["s", "b", "b"], ["a"]]


def differences(config: dict[str, Any], windows: list[list[str]]) -> dict[str, Any]:
    """The largest difference of any weight from plain PyTorch, after each window."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    reference = BigHeads()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.125)
    engine = make_engine(config, model=BigHeads())
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    rank = deepspeed.comm.get_rank()
    report: dict[str, Any] = {"differences": []}
    swapper = engine.optimizer.optimizer_swapper
    written: list[int] = []
    swap_out = swapper.swap_out_gradients

    def counting(parameter: Any, gradient_offsets: Any, gradient_tensors: Any) -> Any:
        written.extend(t.numel() * t.element_size() for t in gradient_tensors)
        return swap_out(parameter, gradient_offsets, gradient_tensors)

    swapper.swap_out_gradients = counting
    for seed, window in enumerate(windows):
        for parameter in reference.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for micro, heads in enumerate(window):
            key = 10 * seed + micro
            engine.backward(engine(batch(heads, key, rank, dtype)), scale_wrt_gas=False)
            for other in range(2):
                (reference(batch(heads, key, other, torch.float32)) / 2).backward()
        engine.step()
        optimizer.step()
        pairs = zip(engine.module.named_parameters(), reference.parameters())
        worst = 0.0
        for (_, ours), theirs in pairs:
            full = safe_get_full_fp32_param(ours)
            worst = max(worst, float((full - theirs).abs().max()))
        report["differences"].append(worst)
    report["written"] = written
    engine.destroy()
    return report


@pytest.mark.builds_op("AsyncIOBuilder")
@pytest.mark.parametrize("param", [False, True], ids=["optimizer", "optimizer and parameters"])
@pytest.mark.parametrize(
    ("dtype", "accum_dtype"), [("fp32", None), ("bf16", "bf16"), ("bf16", "fp32")]
)
def test_nvme(
    ranks: RankPool, tmp_path: Path, dtype: str, accum_dtype: str | None, param: bool
) -> None:
    device = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 6}
    zero: dict[str, Any] = {"offload_optimizer": device, "sub_group_size": 1}
    if param:
        zero["offload_param"] = {**device, "buffer_size": 2 * ROWS * COLUMNS}
    config = make_config(
        stage=3,
        dtype=dtype,
        accum_dtype=accum_dtype,
        zero=zero,
        zero_force_ds_cpu_optimizer=False,
        aio={"block_size": MIN_SWAPPED_BYTES, "queue_depth": 8, "single_submit": False},
    )
    for report in ranks.run(differences, config=config, windows=WINDOWS):
        assert report["differences"] == [0.0] * len(WINDOWS)
        assert max(report["written"]) >= MIN_SWAPPED_BYTES
