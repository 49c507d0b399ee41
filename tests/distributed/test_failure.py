"""An exception never leads to a wrong update: the window goes on as in plain PyTorch, or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.model import reference, same_on_all_ranks
from harness.pool import RankPool
from harness.training import STAGES, forward, full_weights, make_config, make_engine, offload_config


class Raise(torch.autograd.Function):
    """Raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("bad micro-batch")


def fail(config: dict[str, Any], where: str, style: str = "engine") -> dict[str, Any]:
    """A good backward, one that raises (or a step that does), then the rest of the window."""
    import ds_unmanaged_gas

    engine = make_engine(config)
    said: list[str] = []

    def attempt(action: Any) -> None:
        try:
            action()
            said.append("ok")
        except ArithmeticError:
            said.append("raised")
        except ds_unmanaged_gas.WindowFailedError as error:
            said.append(type(error.__cause__).__name__)

    def backward(loss: torch.Tensor) -> None:
        if style == "torch":
            loss.backward()
        else:
            engine.backward(loss, scale_wrt_gas=False)

    attempt(lambda: backward(forward(engine, {"a": 1, "b": 1})))
    if where == "loss":
        attempt(lambda: backward(Raise.apply(forward(engine, {"a": 2, "b": 2}))))
    elif where == "forward":
        engine.module.a.register_forward_pre_hook(lambda *_: 1 / 0)
        attempt(lambda: backward(forward(engine, {"a": 2, "b": 2})))
        engine.module.a._forward_pre_hooks.popitem()
    elif where == "middle":
        # Head b is done, head a is not, when this raises: the first head comes last in backward.
        handle = engine.module.a.bias.register_hook(lambda _: 1 / 0)
        attempt(lambda: backward(forward(engine, {"a": 2, "b": 2})))
        handle.remove()
    else:
        update = engine.basic_optimizer.step
        engine.basic_optimizer.step = lambda *_, **__: 1 / 0
        attempt(engine.step)
        engine.basic_optimizer.step = update
    attempt(lambda: backward(forward(engine, {"a": 3, "b": 3})))
    attempt(engine.step)
    report = {"said": said, "weights": full_weights(engine)}
    report["boundary"] = engine.is_gradient_accumulation_boundary()
    engine.destroy()
    return report


@pytest.mark.parametrize("stage", STAGES)
def test_exception_in_forward_fails_nothing(ranks: RankPool, stage: int) -> None:
    expected = reference(same_on_all_ranks([[{"a": s, "b": s} for s in (1, 3)]]))
    for report in ranks.run(fail, config=make_config(stage=stage), where="forward"):
        assert report["said"] == ["ok", "raised", "ok", "ok"]
        assert report["weights"] == expected[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_exception_before_any_leaf_changes_no_local_gradient(ranks: RankPool, stage: int) -> None:
    expected = reference(same_on_all_ranks([[{"a": s, "b": s} for s in (1, 3)]]))
    for report in ranks.run(fail, config=make_config(stage=stage), where="loss"):
        assert report["said"] == ["ok", "raised", "ok", "ok"]
        assert report["weights"] == expected[0]


@pytest.mark.parametrize("where", ["loss", "middle"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_exception_in_backward_is_never_stepped_over(
    ranks: RankPool, stage: int, where: str, offload: bool
) -> None:
    config = (offload_config if offload else make_config)(stage=stage)
    cause = "ArithmeticError" if where == "loss" else "ZeroDivisionError"
    for report in ranks.run(fail, config=config, where=where):
        assert report["said"] == ["ok", "raised", cause, cause]
        assert not report["boundary"]


@pytest.mark.parametrize("stage", STAGES)
def test_exception_in_step_is_never_stepped_over(ranks: RankPool, stage: int) -> None:
    for report in ranks.run(fail, config=make_config(stage=stage), where="step"):
        assert report["said"] == ["ok", "raised", "ZeroDivisionError", "ZeroDivisionError"]
        assert not report["boundary"]
