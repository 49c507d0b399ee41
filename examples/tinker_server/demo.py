"""A scripted client session against a running server: a table of requests, a picture of the loss.

    python examples/tinker_server/demo.py --url http://127.0.0.1:8300 --api-key tml-local

Learns to write the Python language reference, character by character. How many requests a window
has is decided here, by dice, and differs from step to step. In the middle a request fails, and its
window with it; and the state is saved, and goes on as another model.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import random
from pathlib import Path
from typing import Any

import tinker
from tinker import types

LENGTH = 48
ROW = "{:<34}{:>14}{:>17}{:>12}"


def make_datum(text: bytes, dice: random.Random) -> types.Datum:
    start = dice.randrange(len(text) - LENGTH - 1)
    tokens = list(text[start : start + LENGTH + 1])
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * LENGTH},
    )


def train_step(model: Any, text: bytes, dice: random.Random, *, name: str) -> float | None:
    """Send one window and its optim_step, then read the answers. Returns the loss per token."""
    requests = [
        [make_datum(text, dice) for _ in range(dice.randint(4, 8))]
        for _ in range(dice.randint(1, 5))
    ]
    size = sum(map(len, requests)) * LENGTH
    sent = [model.forward_backward(data, "cross_entropy") for data in requests]
    step = model.optim_step(types.AdamParams(learning_rate=5e-3))
    total = 0.0
    for data, future in zip(requests, sent):
        metrics = future.result(timeout=120).metrics
        total += metrics["loss:sum"]
        loss = metrics["loss:sum"] / (len(data) * LENGTH)
        what = f"{name}: forward_backward of {len(data)}"
        print(ROW.format(what, f"{metrics['micro_batches:sum']:g}", f"{loss:.4f}", ""))
    metrics = step.result(timeout=120).metrics
    print(ROW.format(f"{name}: optim_step", "", "", f"{metrics['grad_norm']:.2f}"))
    return total / size


def fail_once(model: Any, text: bytes, dice: random.Random) -> None:
    good = make_datum(text, dice)
    bad = types.Datum(model_input=good.model_input, loss_fn_inputs={"target_tokens": [0]})
    sent = [
        model.forward_backward([good], "cross_entropy"),
        model.forward_backward([bad], "cross_entropy"),
        model.optim_step(types.AdamParams(learning_rate=1.0)),
    ]
    for future in sent[1:]:
        print(f"refused: {why_it_failed(future)[:160]}")


def why_it_failed(future: Any) -> str:
    try:
        future.result(timeout=120)
    except tinker.RequestFailedError as error:
        return str(error)
    raise SystemExit("a request succeeded that should have failed")


def draw(losses: list[float], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, marker=".")
    axes.set_xlabel("optim_step")
    axes.set_ylabel("loss per token")
    axes.set_title("Trained through the Tinker protocol")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8300")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_SERVER_API_KEY"))
    parser.add_argument("--base-model", default="tiny-random")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("tinker_server.png"))
    options = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")

    text = "\n".join(pydoc_data.topics.topics.values()).encode("latin-1", "replace")
    dice = random.Random(0)
    service = tinker.ServiceClient(base_url=options.url, api_key=options.api_key)
    model = service.create_lora_training_client(
        options.base_model, rank=options.lora_rank, seed=0
    ).result()
    print(ROW.format("request", "micro-batches", "loss per token", "grad norm"))
    losses = []
    for step in range(1, options.steps + 1):
        if step == options.steps // 2:
            fail_once(model, text, dice)
            path = model.save_state("half", overwrite=True).result(timeout=120).path
            model = service.create_training_client_from_state_with_optimizer(path).result()
            print(f"goes on from {path}")
        losses.append(train_step(model, text, dice, name=f"step {step}"))
    draw(losses, options.output)
    print(f"loss per token: {losses[0]:.4f} -> {losses[-1]:.4f}; picture: {options.output}")
    service.close("success").result(timeout=30)


if __name__ == "__main__":
    main()
