"""One process, no test framework: does an installed wheel do what the README says?"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")

import deepspeed
import torch

import ds_unmanaged_gas


def main() -> int:
    assert "site-packages" in ds_unmanaged_gas.__file__, ds_unmanaged_gas.__file__
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    ds_unmanaged_gas.enable()
    deepspeed.init_distributed(
        "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/rendezvous",
        rank=0,
        world_size=1,
        auto_mpi_discovery=False,
    )
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
            "managed_gradient_accumulation": False,
        },
    )
    for count in (1, 3, 2):
        for _ in range(count):
            engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    weight = model.weight.tolist()
    print("weights after windows of 1, 3 and 2 backwards:", weight)
    return 0 if weight == [[-6.0, -6.0]] else 1


if __name__ == "__main__":
    sys.exit(main())
