"""``python -m ds_unmanaged_gas check ds_config.json`` on the installed DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.pool import configure_environment

configure_environment()

from ds_unmanaged_gas.__main__ import main

FLAG = {"managed_gradient_accumulation": False}
BLOCK = "unmanaged_gradient_accumulation"


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any) -> tuple[int, str]:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    code = main(["check", str(path)])
    return code, capsys.readouterr().out


ACCEPTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "managed": ({}, ["managed: ", "stock code decides"]),
    "stage 1": (
        FLAG | {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}},
        ["ZeRO stage 1", "divides the loss by GAS = 4", "nothing is communicated", "reduces once"],
    ),
    "stage 2, offload, items": (
        FLAG
        | {
            BLOCK: {"gradient_scale": "num_items", "check_ranks": True},
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
        ["counts num_items", "on the host", "of all ranks", "= 0.5", "check_ranks: one small"],
    ),
    "stage 3, reduced at step": (
        FLAG | {BLOCK: {"reduction": "step"}, "zero_optimization": {"stage": 3}},
        ["nothing is communicated", "reduces once"],
    ),
    "bf16": (
        FLAG | {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}},
        ["ZeRO stage 3", "warning: ", "grad_accum_dtype"],
    ),
    "auto": (
        FLAG | {"train_batch_size": "auto", "zero_optimization": {"stage": "auto"}},
        ["train_batch_size, zero_optimization.stage", "ZeRO stage 0"],
    ),
    "for 64 ranks": (
        FLAG | {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1},
        ["unmanaged: accepted"],
    ),
    "a misspelt key": ({"managed_gradient_acumulation": False}, ["warning: ", "did you mean"]),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    config, expected = ACCEPTED[name]
    code, said = check(tmp_path, capsys, config)
    assert code == 0, said
    for text in expected:
        assert text in said


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "a string": ({"managed_gradient_accumulation": "false"}, ["'false' is not a boolean"]),
    "an option": (FLAG | {BLOCK: {"gradient_scale": "mean"}}, ["'mean'", "num_items"]),
    "MiCS": (FLAG | {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, ["mics_shard_size"]),
    # From 0.19.8 on DeepSpeed refuses it.
    "a graph": (FLAG | {"graph_harvesting": True}, ["graph_harvesting", "refused"]),
    "DeepSpeed": ({"zero_optimization": {"stage": 7}}, ["refused by DeepSpeed: ", "stage"]),
    "no object": ([1], ["not a JSON object"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    config, expected = REFUSED[name]
    code, said = check(tmp_path, capsys, config)
    assert code == 1
    for text in expected:
        assert text in said


def test_from_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    for file, code, text in ((path, 1, "can't be read"), (tmp_path / "none", 1, "can't be read")):
        command = [sys.executable, "-m", "ds_unmanaged_gas", "check", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, text in done.stdout) == (code, True)
