"""examples/tinker_server, driven by the real `tinker` client and compared with plain PyTorch."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.pool import configure_environment
from harness.tinker_process import (
    KEY,
    FaultyProxy,
    Reference,
    ServerProcess,
    largest_difference,
    post,
)

tinker = pytest.importorskip("tinker", reason="needs the tinker SDK (Python 3.11 or later)")
types = tinker.types

pytestmark = [
    # Nothing of this package runs in this process; the SDK and transformers warn of themselves.
    pytest.mark.filterwarnings("ignore"),
]

RANK = 8
WAIT_S = 60
SESSION_TIMEOUT_S = 25
GAP_TIMEOUT_S = 3

ADAMS = [
    {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3},
    {"learning_rate": 3e-3, "beta1": 0.8, "beta2": 0.99, "eps": 5e-3, "weight_decay": 0.1},
    {"learning_rate": 2e-2, "beta1": 0.5, "beta2": 0.9, "eps": 2e-3, "grad_clip_norm": 0.5},
]
"""Each optim_step of a test with other values of everything."""

TOLERANCE = 2e-6
"""Largest accepted difference of a weight, or of a log-probability per unit of its magnitude.

The server adds up the same fp32 gradients as the reference in the same order, and updates flat
partitions with the same formula. Clipping divides by a norm that is summed in another order and
takes 1e-6 off in another place, a relative error of some 1e-6 of an update of the order of lr; the
windows after it inherit that. A lost or doubled datum is an error of the order of lr.
"""


@pytest.fixture(scope="module", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    configure_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("TINKER_TELEMETRY", "0")
        yield
    gc.collect()  # the SDK's connections, which it does not close, while the mark above holds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """LoRA, ZeRO-1."""
    arguments = f"--lora-rank {RANK} --slots 8 --session-timeout {SESSION_TIMEOUT_S} "
    arguments += f"--gap-timeout {GAP_TIMEOUT_S}"
    process = ServerProcess(tmp_path_factory.mktemp("lora"), *arguments.split())
    yield process
    process.stop()
    assert "Traceback" not in process.log().split("SignalException")[0].split("Received 15")[0]


@pytest.fixture
def service(server: ServerProcess) -> Iterator[Any]:
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield client
    client.close("success").result(timeout=WAIT_S)


def sequence(seed: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, targets and weights: some zero, some negative."""
    dice = np.random.RandomState(seed)
    length = int(dice.randint(3, 12))
    tokens = dice.randint(0, 256, length + 1).tolist()
    weights = np.round(dice.rand(length) * 2 - 0.5, 2).astype(np.float32)
    weights[0] = 0
    return tokens[:-1], tokens[1:], weights.tolist()


def datum(seed: int, **inputs: Any) -> Any:
    tokens, targets, weights = sequence(seed)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": targets, "weights": weights} | inputs,
    )


def new_model(service: Any, seed: int = 1) -> Any:
    return service.create_lora_training_client("tiny-random", rank=RANK, seed=seed).result()


def start_of(server: ServerProcess, model: Any, name: str = "start") -> Any:
    return server.state(model.save_state(name).result(timeout=WAIT_S).path)["weights"]


def send_window(model: Any, requests: list[list[int]], adam: dict[str, float]) -> list[Any]:
    """Everything is sent before the first answer is read."""
    futures = [
        model.forward_backward([datum(i) for i in seeds], "cross_entropy") for seeds in requests
    ]
    return [*futures, model.optim_step(types.AdamParams(**adam))]


def results(futures: list[Any]) -> list[Any]:
    return [future.result(timeout=WAIT_S) for future in futures]


def logprobs(model: Any, seeds: list[int]) -> list[list[float]]:
    output = model.forward([datum(i) for i in seeds], "cross_entropy").result(timeout=WAIT_S)
    return [each["logprobs"].tolist() for each in output.loss_fn_outputs]


def train_reference(
    reference: Reference, windows: list[list[list[int]]], adams: list[dict[str, float]]
) -> list[tuple[list[float], float]]:
    """The losses by datum and the norm of each window."""
    history = []
    for window, adam in zip(windows, adams, strict=True):
        losses = [reference.cross_entropy(*sequence(i)) for seeds in window for i in seeds]
        history.append((losses, reference.step(**adam)))
    return history


WINDOWS = [[[1]], [[2], [3, 4], [5]], [[6], [7], [8, 9], [10], [11, 12, 13]]]
"""1, 3 and 5 forward_backwards, by the seeds of their data."""


def test_windows_of_any_length_train_as_plain_pytorch(server: ServerProcess, service: Any) -> None:
    model = new_model(service)
    start = start_of(server, model)
    reference = Reference(start, RANK)
    for index, (window, adam) in enumerate(zip(WINDOWS, ADAMS)):
        *outputs, step = results(send_window(model, window, adam))
        ((losses, norm),) = train_reference(reference, [window], [adam])
        assert sum(o.metrics["loss:sum"] for o in outputs) == pytest.approx(sum(losses), rel=1e-5)
        assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert step.metrics["forward_backwards"] == len(window)
        assert step.metrics["updates"] == index + 1
        saved = server.state(model.save_state(f"w{index}").result(timeout=WAIT_S).path)
        difference = largest_difference(saved["weights"], reference.weights())
        print(f"window {index}: weights differ by {difference:.1e}")
        assert difference <= TOLERANCE
        ours = logprobs(model, [1, 20])
        theirs = [reference.logprobs(*sequence(i)[:2]).tolist() for i in (1, 20)]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, rel=10 * TOLERANCE)
    # Not by being insensitive: without one datum it is another update.
    less = Reference(start, RANK)
    train_reference(less, [[[2], [3, 4]]], ADAMS[:1])
    more = Reference(start, RANK)
    train_reference(more, [[[2], [3, 4], [5]]], ADAMS[:1])
    assert largest_difference(less.weights(), more.weights()) > 100 * TOLERANCE


def train_split(server: ServerProcess, url: str, requests: list[list[int]]) -> dict[str, Any]:
    """One window, split so, by a client of its own. Returns the saved state."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    model = client.create_lora_training_client("tiny-random", rank=RANK, seed=1).result()
    for adam in ADAMS:
        results(send_window(model, requests, adam))
    state = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    client.close("success").result(timeout=WAIT_S)
    return state


def test_splitting_the_data_changes_no_bit(server: ServerProcess) -> None:
    import torch

    seeds = list(range(30, 39))
    whole = train_split(server, server.url, [seeds])
    proxy = FaultyProxy(server.url, fwdbwd_max_chunk_len=2)
    splits = {
        "3": (server.url, [seeds[:2], seeds[2:6], seeds[6:]]),
        "9": (server.url, [[seed] for seed in seeds]),
        "5 by the SDK": (proxy.url, [seeds]),
    }
    for name, (url, requests) in splits.items():
        split = train_split(server, url, requests)
        for key in ("weights", "exp_avg", "exp_avg_sq"):
            for parameter, tensor in whole[key].items():
                assert torch.equal(split[key][parameter], tensor), (name, key, parameter)
    # The SDK really cut it, and sent the first piece last.
    from tinker.proto.tinker_public_pb2 import ForwardBackwardRequest

    sent = [b for path, b in proxy.arrivals if path == "forward_backward"]
    order = [ForwardBackwardRequest.FromString(body).seq_id for body in sent[:5]]
    assert sorted(order) == [1, 2, 3, 4, 5]
    assert order[-1] == 1
    proxy.close()


def test_retries_of_the_client_change_nothing(server: ServerProcess, service: Any) -> None:
    window = [[1], [2, 3], [4]]
    expected = results(send_window(new_model(service), window, ADAMS[0]))
    proxy = FaultyProxy(server.url)
    client = tinker.ServiceClient(base_url=proxy.url, api_key=KEY)
    model = client.create_lora_training_client("tiny-random", rank=RANK, seed=1).result()
    proxy.faults += [
        ("forward_backward", "drop"),
        ("forward_backward", 503),
        ("forward_backward", 429),
        ("optim_step", "drop"),
        ("retrieve_future", "drop"),
    ]
    got = results(send_window(model, window, ADAMS[0]))
    assert proxy.faults == []
    assert [r.metrics for r in got] == [r.metrics for r in expected]
    assert got[-1].metrics["updates"] == 1
    sent = [path for path, _ in proxy.arrivals]
    assert sent.count("forward_backward") == len(window) + 1
    assert sent.count("optim_step") == 2
    client.close("success").result(timeout=WAIT_S)
    proxy.close()


BAD = {
    "a token that is none": lambda m: m.forward_backward(
        [datum(1), datum(2, target_tokens=[999] * len(sequence(2)[0]))], "cross_entropy"
    ),
    "a weight that is none": lambda m: m.forward_backward(
        [datum(2, weights=[float("nan")] * len(sequence(2)[0]))], "cross_entropy"
    ),
    "an input of another length": lambda m: m.forward_backward(
        [datum(2, weights=[1.0])], "cross_entropy"
    ),
    "an unknown loss": lambda m: m.forward_backward([datum(2)], "cispo"),
    "a loss that is infinite": lambda m: m.forward_backward(
        [
            datum(2, weights=[3e38] * len(sequence(2)[0])),
        ],
        "cross_entropy",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_failed_request_takes_its_window_along_and_no_other(
    server: ServerProcess, service: Any, what: str
) -> None:
    model, bystander = new_model(service), new_model(service, 2)
    reference = Reference(start_of(server, model), RANK)
    unharmed = Reference(start_of(server, bystander), RANK)
    # The engine's window is the bystander's, or the failing one.
    if list(BAD).index(what) % 2:
        bystander.forward_backward([datum(50)], "cross_entropy").result(timeout=WAIT_S)
    before = model.forward_backward([datum(7)], "cross_entropy")
    bad = BAD[what](model)
    after = model.forward_backward([datum(8)], "cross_entropy")
    step = model.optim_step(types.AdamParams(**ADAMS[0]))
    before.result(timeout=WAIT_S)
    with pytest.raises(tinker.RequestFailedError) as failure:
        bad.result(timeout=WAIT_S)
    print(failure.value)
    after.result(timeout=WAIT_S)
    results(send_window(bystander, [[51]], ADAMS[0]))
    with pytest.raises(tinker.RequestFailedError, match="gradient window was discarded"):
        step.result(timeout=WAIT_S)
    # The next window is clean.
    *_, update = results(send_window(model, [[1], [2]], ADAMS[0]))
    train_reference(reference, [[[1], [2]]], [ADAMS[0]])
    assert update.metrics["updates"] == 1
    opened = [[50]] if list(BAD).index(what) % 2 else []
    train_reference(unharmed, [[*opened, [51]]], [ADAMS[0]])
    for each, expected in ((model, reference), (bystander, unharmed)):
        saved = server.state(each.save_state("end").result(timeout=WAIT_S).path)
        assert largest_difference(saved["weights"], expected.weights()) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "value"), [("learning_rate", float("nan")), ("beta1", 1.0), ("grad_clip_norm", -1.0)]
)
def test_a_bad_optim_step_applies_nothing_and_ends_its_window(
    server: ServerProcess, service: Any, name: str, value: float
) -> None:
    model = new_model(service)
    start = start_of(server, model)
    *_, step = send_window(model, [[1]], ADAMS[0] | {name: value})
    with pytest.raises(tinker.RequestFailedError, match=name):
        step.result(timeout=WAIT_S)
    saved = server.state(model.save_state("after").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], start) == 0
    reference = Reference(start, RANK)
    results(send_window(model, [[2]], ADAMS[0]))
    train_reference(reference, [[[2]]], [ADAMS[0]])
    saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], reference.weights()) <= TOLERANCE


def test_gradients_that_are_not_finite_are_not_applied(server: ServerProcess, service: Any) -> None:
    """Of a loss that is finite: two large weights that nearly cancel."""
    model = new_model(service)
    reference = Reference(start_of(server, model), RANK)
    length = len(sequence(2)[0])
    weights = [3e37, -3e37, *[0.0] * (length - 2)]
    loss = model.forward_backward([datum(2, weights=weights)], "cross_entropy")
    step = model.optim_step(types.AdamParams(**ADAMS[0]))
    assert np.isfinite(loss.result(timeout=WAIT_S).metrics["loss:sum"])
    with pytest.raises(tinker.RequestFailedError, match="not finite"):
        step.result(timeout=WAIT_S)
    results(send_window(model, [[1], [2]], ADAMS[0]))
    train_reference(reference, [[[1], [2]]], [ADAMS[0]])
    saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], reference.weights()) <= TOLERANCE


def test_interleaved_models_train_as_each_would_alone(server: ServerProcess, service: Any) -> None:
    """In every order of who opens, and who ends, the engine's window; with forwards in between."""
    models = [new_model(service, seed) for seed in range(3)]
    references = [Reference(start_of(server, model), RANK) for model in models]
    dice = np.random.RandomState(0)
    windows: list[list[list[int]]] = [[], [], []]
    steps, recomputed = [0, 0, 0], 0.0
    for seed in range(100, 160):
        who = int(dice.randint(3))
        act = dice.rand()
        if act < 0.6:
            windows[who].append([seed, seed + 1])
            future = models[who].forward_backward([datum(seed), datum(seed + 1)], "cross_entropy")
        elif act < 0.75:
            future = models[who].forward([datum(seed)], "cross_entropy")
        else:
            adam = ADAMS[steps[who] % len(ADAMS)]
            future = models[who].optim_step(types.AdamParams(**adam))
            train_reference(references[who], [windows[who]], [adam])
            windows[who], steps[who] = [], steps[who] + 1
            recomputed += future.result(timeout=WAIT_S).metrics["recomputed"]
        future.result(timeout=WAIT_S)
    print(f"{steps} updates, {recomputed:g} of them recomputed")
    assert min(steps) > 2
    assert 0 < recomputed < sum(steps)
    for model, reference in zip(models, references):
        saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
        difference = largest_difference(saved["weights"], reference.weights())
        print(f"{difference:.1e}")
        assert difference <= 10 * TOLERANCE  # five updates and more


def test_an_optim_step_without_gradients_is_an_update_with_zeros(
    server: ServerProcess, service: Any
) -> None:
    model = new_model(service)
    reference = Reference(start_of(server, model), RANK)
    windows: list[list[list[int]]] = [[[1]], [], [[2]]]
    for window in windows:
        results(send_window(model, window, ADAMS[1]))
    train_reference(reference, windows, [ADAMS[1]] * 3)
    saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], reference.weights()) <= TOLERANCE


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
def test_policy_losses_train_as_plain_pytorch(
    server: ServerProcess, service: Any, loss: str
) -> None:
    import torch

    model = new_model(service)
    reference = Reference(start_of(server, model), RANK)
    config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if loss == "ppo" else None
    data, total = [], 0.0
    for seed in range(5):
        tokens, targets, _ = sequence(seed)
        now = reference.logprobs(tokens, targets)
        dice = np.random.RandomState(seed)
        old = now.detach() + torch.tensor(dice.randn(len(tokens)) * 0.3).float()
        gain = torch.tensor(dice.randn(len(tokens))).float()
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens),
                loss_fn_inputs={
                    "target_tokens": targets,
                    "logprobs": old.tolist(),
                    "advantages": gain.tolist(),
                },
            )
        )
        ratio = (now - old).exp()
        each = ratio * gain
        if loss == "ppo":
            each = torch.minimum(each, ratio.clamp(0.9, 1.1) * gain)
        total += float(-each.sum())
        reference.backward(-each.sum())
    output = model.forward_backward(data, loss, config).result(timeout=WAIT_S)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    model.optim_step(types.AdamParams(**ADAMS[0])).result(timeout=WAIT_S)
    reference.step(**ADAMS[0])
    saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], reference.weights()) <= TOLERANCE


def test_a_saved_state_continues_with_or_without_its_optimizer(
    server: ServerProcess, service: Any
) -> None:
    model = new_model(service)
    reference = Reference(start_of(server, model), RANK)
    for window, adam in zip(WINDOWS[:2], ADAMS[:2]):
        results(send_window(model, window, adam))
    # Gradients that no optim_step has applied are not in it, and stay.
    model.forward_backward([datum(60)], "cross_entropy").result(timeout=WAIT_S)
    path = model.save_state("two").result(timeout=WAIT_S).path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    weights_only = service.create_training_client_from_state(path).result()
    for each, requests in ((model, [[61]]), (resumed, [[60], [61]]), (weights_only, [[60], [61]])):
        results(send_window(each, requests, ADAMS[0]))
    uninterrupted, same, fresh = (
        server.state(each.save_state("three").result(timeout=WAIT_S).path)["weights"]
        for each in (model, resumed, weights_only)
    )
    assert largest_difference(same, uninterrupted) == 0
    train_reference(reference, [*WINDOWS[:2], [[60], [61]]], [*ADAMS[:2], ADAMS[0]])
    assert largest_difference(uninterrupted, reference.weights()) <= TOLERANCE
    after_two = Reference(server.state(path)["weights"], RANK)
    train_reference(after_two, [[[60], [61]]], [ADAMS[0]])
    assert largest_difference(fresh, after_two.weights()) <= TOLERANCE
    assert largest_difference(fresh, uninterrupted) > 100 * TOLERANCE


def test_states_are_not_overwritten_and_not_loaded_late(service: Any) -> None:
    model = new_model(service)
    path = model.save_state("once").result(timeout=WAIT_S).path
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        model.save_state("once").result(timeout=WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="only a model's first request may load"):
        model.load_state(path).result(timeout=WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="not tinker://"):
        model.save_state("../once").result(timeout=WAIT_S)
    with pytest.raises(tinker.RequestFailedError, match="there is no"):
        service.create_training_client_from_state(f"{path}2").result()


def test_what_the_server_cannot_do_is_refused(service: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="trains rank 8"):
        service.create_lora_training_client("tiny-random", rank=16).result()
    with pytest.raises(tinker.RequestFailedError, match="train_mlp"):
        service.create_lora_training_client("tiny-random", rank=RANK, train_mlp=False).result()
    with pytest.raises(tinker.RequestFailedError, match="this server has 'tiny-random'"):
        service.create_lora_training_client("some/other", rank=RANK).result()


def test_slots_are_limited_and_given_back(server: ServerProcess) -> None:
    for _ in range(2):
        client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
        models = []
        with pytest.raises(tinker.RequestFailedError, match="slots are taken"):
            while len(models) <= 8:
                models.append(new_model(client))
        assert models
        client.close("success").result(timeout=WAIT_S)
        # The server has seen /finish.
        status, _ = post(server.url, "get_info", {"model_id": models[0].model_id})
        assert status == 404


def test_requests_without_the_key_or_too_large_are_refused(server: ServerProcess) -> None:
    assert post(server.url, "create_session", {}, key="tml-other")[0] == 401
    # Read, and no message; twice as large, not even read.
    assert post(server.url, "forward_backward", b"\xff" * (8 * 2**20))[0] == 400
    assert post(server.url, "forward_backward", b"\xff" * (17 * 2**20))[0] == 413
    assert post(server.url, "optim_step", b"no JSON")[0] == 400


def test_a_request_that_never_comes_fails_those_behind_it(server: ServerProcess) -> None:
    _, session = post(server.url, "create_session", {})
    creation = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "lora_config": {"rank": RANK},
    }
    _, created = post(server.url, "create_model", creation)
    model = {"model_id": created["model_id"]}
    _, first = post(server.url, "save_weights", {**model, "seq_id": 1, "path": "a"})
    step = {**model, "seq_id": 3, "adam_params": {**ADAMS[0]}}
    _, third = post(server.url, "optim_step", step)
    assert post(server.url, "optim_step", step)[1] == third
    assert post(server.url, "optim_step", {**step, "adam_params": ADAMS[1]})[0] == 422
    assert "path" in post(server.url, "retrieve_future", first)[1]
    begin = time.monotonic()
    status, answer = post(server.url, "retrieve_future", third)
    print(f"{time.monotonic() - begin:.1f} s: {answer}")
    assert status == 200
    assert "request 2 of this model did not arrive" in answer["error"]
    # And the stream goes on.
    _, fourth = post(server.url, "optim_step", {**step, "seq_id": 4})
    assert post(server.url, "retrieve_future", fourth)[1]["metrics"]["updates"] == 1
    post(server.url, f"sessions/{session['session_id']}/finish", {})


@contextmanager
def clients(server: ServerProcess, rank: int, count: int, steps: int) -> Iterator[Any]:
    script = Path(__file__).parents[1] / "harness" / "tinker_client.py"
    command = [sys.executable, str(script), server.url, KEY, str(rank), str(count), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_client_changes_nothing_for_others(server: ServerProcess, service: Any) -> None:
    with clients(server, RANK, 1, 0) as client:
        killed = json.loads(client.stdout.readline())["model"]
        assert "accumulated" in client.stdout.readline()
        model = new_model(service)
        reference = Reference(start_of(server, model), RANK)
        window: list[Any] = [model.forward_backward([datum(1)], "cross_entropy")]
    # The dead client's window was the engine's.
    step = results([*window, *send_window(model, [[2]], ADAMS[0])])[-1]
    assert step.metrics["recomputed"] == 1
    train_reference(reference, [[[1], [2]]], [ADAMS[0]])
    saved = server.state(model.save_state("end").result(timeout=WAIT_S).path)
    assert largest_difference(saved["weights"], reference.weights()) <= TOLERANCE
    # Its slot comes free when it has been silent for long enough, without any update.
    deadline = time.monotonic() + 3 * SESSION_TIMEOUT_S
    while f"{killed}: released after 0 updates" not in server.log():
        assert time.monotonic() < deadline
        time.sleep(0.5)


CLIENTS = 8


def test_shutting_down_under_load_loses_and_repeats_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Full fine-tuning, ZeRO-2, micro-batches of two."""
    arguments = f"--lora-rank 0 --slots {CLIENTS} --stage 2 --micro-batch-size 2"
    server = ServerProcess(tmp_path, *arguments.split())
    try:
        # What a client gets that nobody interrupts, and plain PyTorch.
        with clients(server, 0, 1, 12) as alone:
            first, *told = alone.stdout.read().splitlines()
        expected = [json.loads(line) for line in told]
        assert all("error" not in each for each in expected)
        post_finish(server, json.loads(first)["model"])
        compare_with_reference(expected)
        for line in expected:
            del line["client"]

        lines: list[dict[str, Any]] = []
        with clients(server, 0, CLIENTS, 1000) as all_clients:
            while sum("grad_norm" in each for each in lines) < 2 * CLIENTS:
                lines.append(json.loads(all_clients.stdout.readline()))
            begin = time.monotonic()
            server.process.terminate()
            lines += [json.loads(line) for line in all_clients.stdout.read().splitlines()]
        server.process.wait(timeout=WAIT_S)
        took = time.monotonic() - begin
    finally:
        server.stop()

    answered = refused = updates = 0
    by_client: dict[int, list[dict[str, Any]]] = {client: [] for client in range(CLIENTS)}
    for line in lines:
        by_client[line.pop("client")].append(line)
    for mine in by_client.values():
        model = mine.pop(0)["model"]
        done = [each for each in mine if "error" not in each]
        errors = [each for each in mine if "error" in each]
        # Every request that was sent has an answer: the right one, or that it had no effect.
        assert all("no effect" in e["error"] or "discarded" in e["error"] for e in errors), errors
        assert done == expected[: len(done)]
        steps = sum("grad_norm" in each for each in done)
        assert f"{model}: {steps} updates at shutdown" in server.log()
        answered, refused, updates = answered + len(done), refused + len(errors), updates + steps
    assert refused > 0
    assert "some answers were not fetched" not in server.log()
    assert "Traceback" not in server.log().split("Received 15")[0]
    print(
        f"{CLIENTS} clients: {answered} requests answered, {updates} of them updates; "
        f"{refused} refused; gone after {took:.1f} s"
    )


def post_finish(server: ServerProcess, model_id: str) -> None:
    post(server.url, f"sessions/{model_id.split(':', maxsplit=1)[0]}/finish", {})


def compare_with_reference(told: list[dict[str, Any]]) -> None:
    """What tinker_client.py trains, by plain PyTorch."""
    from harness.tinker_client import ADAM, datum
    from tinker_server.models import make_base

    reference = Reference(dict(make_base(None).named_parameters()), 0)
    for step in range(6):
        losses = []
        for i in range(1 + step % 3):
            total = 0.0
            for each in (datum(10 * step + i), datum(50 + i)):
                inputs = {name: data.tolist() for name, data in each.loss_fn_inputs.items()}
                total += reference.cross_entropy(
                    each.model_input.to_ints(), inputs["target_tokens"], inputs["weights"]
                )
            losses.append(total)
        norm = reference.step(
            learning_rate=ADAM.learning_rate, beta1=ADAM.beta1, beta2=ADAM.beta2, eps=ADAM.eps
        )
        mine = [each for each in told if each["step"] == step]
        assert [each["loss"] for each in mine[:-1]] == pytest.approx(losses, rel=1e-4)
        assert mine[-1]["grad_norm"] == pytest.approx(norm, rel=1e-4)
