"""What can't be honoured is refused, with the setting, its value and the way out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from harness.pool import RankPool
from harness.releases import DEEPSPEED, between
from harness.training import forward, make_config, make_engine


def initialize(config: dict[str, Any], pipeline: bool = False) -> tuple[str, str, list[str], bool]:
    """The error of deepspeed.initialize(): its classes, its text, warnings, and whether the
    engine is unmanaged."""
    import ds_unmanaged_gas

    model = None
    if pipeline:
        import torch
        from deepspeed.runtime.pipe.module import PipelineModule

        model = PipelineModule(
            layers=[torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)],
            num_stages=2,
            loss_fn=torch.nn.MSELoss(),
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine = make_engine(config, model=model)
        except Exception as error:
            bases = "/".join(c.__name__ for c in type(error).__mro__)
            return bases, str(error), [], False
    texts = [str(w.message) for w in caught if "ds_config key" in str(w.message)]
    unmanaged = ds_unmanaged_gas.is_unmanaged(engine)
    engine.destroy()
    return "", "", texts, unmanaged


@pytest.mark.parametrize("value", ["false", "False", "no", 0, 1, None, [], {}])
def test_flag_that_is_no_boolean(ranks: RankPool, value: Any) -> None:
    config = make_config(stage=0) | {"managed_gradient_accumulation": value}
    for bases, text, _, _ in ranks.run(initialize, config=config):
        assert "UnsupportedConfigError" in bases
        assert f'"managed_gradient_accumulation"] = {value!r}' in text
        assert "true or false" in text


@pytest.mark.parametrize(
    "key",
    ["managed_gradient_acumulation", "managed_gradients_accumulation", "managed_grad_accumulation"],
)
def test_key_that_is_nearly_the_flag_warns(ranks: RankPool, key: str) -> None:
    config = make_config(stage=0, unmanaged=False, **{key: False})
    for bases, _, texts, unmanaged in ranks.run(initialize, config=config):
        assert bases == ""
        assert not unmanaged
        assert len(texts) == 1
        assert f'"{key}"' in texts[0]
        assert '"managed_gradient_accumulation"' in texts[0]


BAD_BLOCKS: dict[str, Any] = {
    "gradient_scal": {"gradient_scal": "none"},
    "'tokens'": {"gradient_scale": "tokens"},
    "'never'": {"reduction": "never"},
    "check_ranks": {"check_ranks": 1},
    "not a JSON object": "none",
}


@pytest.mark.parametrize("said", BAD_BLOCKS)
def test_bad_options_block_is_refused(ranks: RankPool, said: str) -> None:
    config = make_config(stage=0, unmanaged_gradient_accumulation=BAD_BLOCKS[said])
    for bases, text, _, _ in ranks.run(initialize, config=config):
        assert "UnsupportedConfigError" in bases
        assert said in text
        assert "unmanaged_gradient_accumulation" in text


def test_options_block_of_a_managed_engine_is_refused(ranks: RankPool) -> None:
    config = make_config(
        stage=0, unmanaged=False, unmanaged_gradient_accumulation={"gradient_scale": "none"}
    )
    for bases, text, _, _ in ranks.run(initialize, config=config):
        assert "UnsupportedConfigError" in bases
        assert "no effect on a managed engine" in text


REFUSED: dict[str, dict[str, Any]] = {
    "DeepCompile": {"compile": {"deepcompile": True}},
    "ZenFlow": {"zero": {"offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.5}}},
    "SuperOffload": {"zero": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    "graph_harvesting": {"graph_harvesting": True},
}

RELEASES: dict[str, tuple[str, str | None]] = {
    "DeepCompile": ("0.16.6", None),
    "ZenFlow": ("0.17.5", None),
    "SuperOffload": ("0.18.0", None),
    "graph_harvesting": ("0.15.0", "0.19.7"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(ranks: RankPool, name: str) -> None:
    options = REFUSED[name]
    if not between(*RELEASES[name]):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no {name}")
    stage = 3 if name == "SuperOffload" else 2
    for bases, text, _, _ in ranks.run(initialize, config=make_config(stage=stage, **options)):
        assert "UnsupportedConfigError" in bases
        assert "AssertionError" in bases
        assert '"managed_gradient_accumulation": false is not supported with' in text
        assert name in text


def managed_with_a_graph() -> str:
    """Control: managed engines go on as they are."""
    engine = make_engine(make_config(stage=2, unmanaged=False, **REFUSED["graph_harvesting"]))
    name = type(engine.optimizer).__name__
    engine.destroy()
    return name


@pytest.mark.parametrize("plugin", [True, False])
def test_graph_harvesting_of_a_managed_engine(ranks: RankPool, plugin: bool) -> None:
    if not between(*RELEASES["graph_harvesting"]):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no graph_harvesting")
    expected = ["DeepSpeedZeroOptimizer"] * 2
    assert ranks.run(managed_with_a_graph, plugin=plugin) == expected


ONE_BIT = {"OnebitAdam": "adam", "ZeroOneAdam": "zoadam", "OnebitLamb": "lamb"}


def give_optimizer(name: str, derived: bool, unmanaged: bool) -> tuple[str, str]:
    """The error of deepspeed.initialize() with an optimizer object of the caller's."""
    import importlib

    import torch

    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{ONE_BIT[name]}")
    kind = getattr(module, name)
    if derived:
        kind = type("Derived", (kind,), {})

    def make_optimizer(parameters: Any) -> Any:
        # The real class, but for its back ends of communication, which want cupy or MPI.
        optimizer = kind.__new__(kind)
        torch.optim.Optimizer.__init__(optimizer, parameters, {"lr": 0.125})
        return optimizer

    config = make_config(stage=0, unmanaged=unmanaged)
    try:
        make_engine(config, optimizer=make_optimizer).destroy()
    except Exception as error:
        return "/".join(c.__name__ for c in type(error).__mro__), str(error)
    return "", ""


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("name", ONE_BIT)
def test_one_bit_optimizer_of_the_caller_is_refused(
    ranks: RankPool, name: str, derived: bool
) -> None:
    """In the words that refuse its name in the ds_config."""
    if not between("0.15.0", "0.19.6"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no 1-bit optimizers")
    from ds_unmanaged_gas.config import against_optimizer

    managed = ranks.run(give_optimizer, name=name, derived=derived, unmanaged=False, plugin=False)
    assert managed == [("", "")] * 2
    for bases, text in ranks.run(give_optimizer, name=name, derived=derived, unmanaged=True):
        assert "UnsupportedConfigError" in bases
        assert str(against_optimizer(name)) in text
        assert f"optimizer {name.lower()}: it communicates" in text


def test_pipeline_is_refused(ranks: RankPool) -> None:
    for bases, text, _, _ in ranks.run(initialize, config=make_config(stage=0), pipeline=True):
        assert "UnsupportedConfigError" in bases
        assert "pipeline parallelism" in text


def call(config: dict[str, Any], method: str) -> tuple[str, str]:
    """Call a method that would take the boundary; then check that the window survived it."""
    engine = make_engine(config)
    engine.backward(forward(engine, {"a": 1, "b": 1}))
    if not hasattr(engine, method):
        engine.destroy()
        return "AssertionError", f"{method} does not exist here"
    try:
        if method == "set_gradient_accumulation_boundary":
            engine.set_gradient_accumulation_boundary(True)
        else:
            with getattr(engine, method)():
                if engine.zero_optimization_stage() < 2:
                    engine.step()
    except Exception as error:
        engine.step()
        assert engine.global_samples == 4
        engine.destroy()
        return "/".join(c.__name__ for c in type(error).__mro__), str(error)
    return "", ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "method", ["set_gradient_accumulation_boundary", "coalesce_grad_reduction", "no_sync"]
)
def test_calls_that_take_the_boundary_are_refused(ranks: RankPool, method: str, stage: int) -> None:
    """no_sync() itself is fine at stages 0 and 1; step() inside it is not."""
    for bases, text in ranks.run(call, config=make_config(stage=stage), method=method):
        assert "AssertionError" in bases
        assert method in text


def backward_inside_no_sync(config: dict[str, Any]) -> int:
    engine = make_engine(config)
    with engine.no_sync():
        engine.backward(forward(engine, {"a": 1, "b": 1}), scale_wrt_gas=False)
    engine.backward(forward(engine, {"a": 2, "b": 2}), scale_wrt_gas=False)
    engine.step()
    from harness.model import reference, same_on_all_ranks
    from harness.training import full_weights

    windows = [[{"a": 1, "b": 1}, {"a": 2, "b": 2}]]
    assert [full_weights(engine)] == reference(same_on_all_ranks(windows))
    samples = int(engine.global_samples)
    engine.destroy()
    return samples


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_is_harmless_where_nothing_is_reduced_before_step(
    ranks: RankPool, stage: int
) -> None:
    if not between("0.16.0"):
        pytest.skip(f"DeepSpeed {DEEPSPEED} has no no_sync()")
    assert ranks.run(backward_inside_no_sync, config=make_config(stage=stage)) == [8, 8]


def disable_with_an_open_window() -> list[str]:
    import ds_unmanaged_gas

    engine = make_engine(make_config(stage=1))
    engine.backward(forward(engine, {"a": 1, "b": 1}))
    said = []
    for action in (
        ds_unmanaged_gas.disable,
        engine.step,
        ds_unmanaged_gas.disable,
        engine.step,
        lambda: forward(engine, {"a": 1, "b": 1}),
        ds_unmanaged_gas.enable,
        lambda: engine.backward(forward(engine, {"a": 1, "b": 1})),
        engine.step,
    ):
        try:
            action()
            said.append("ok")
        except ds_unmanaged_gas.UnmanagedGasError as error:
            said.append(type(error).__name__)
    engine.destroy()
    return said


def test_disable_never_leaves_an_unmanaged_engine_to_stock_code(ranks: RankPool) -> None:
    for said in ranks.run(disable_with_an_open_window):
        assert said == [
            "WindowOpenError",
            "ok",
            "ok",
            "EngineRetiredError",
            "EngineRetiredError",
            "ok",
            "ok",
            "ok",
        ]
