"""Clients in a process of their own, which can be killed.

    python tinker_client.py URL KEY RANK COUNT STEPS

COUNT clients train the same windows at the same time. Each prints a line of JSON per answer, and
stops after STEPS steps or at the first request that is not answered as it should be. With 0 STEPS
one client sends two forward_backwards, and waits for ever without an optim_step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import numpy as np
import tinker
from tinker import types

_one_line_at_a_time = threading.Lock()

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-4)


def datum(seed: int) -> types.Datum:
    dice = np.random.RandomState(seed)
    length = int(dice.randint(3, 12))
    tokens = dice.randint(0, 256, length + 1).tolist()
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


def say(client: int, **what: Any) -> None:
    with _one_line_at_a_time:
        print(json.dumps({"client": client, **what}), flush=True)


def train(client: int, url: str, key: str, rank: int, steps: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client("tiny-random", rank=rank, seed=7).result()
    say(client, model=training.model_id)
    if steps == 0:
        for seed in range(2):
            training.forward_backward([datum(seed)], "cross_entropy").result(timeout=60)
        say(client, accumulated=2)
        time.sleep(3600)
    for step in range(steps):
        # The whole window is sent before its first answer is read.
        sent = [
            training.forward_backward([datum(10 * step + i), datum(50 + i)], "cross_entropy")
            for i in range(1 + step % 3)
        ]
        sent.append(training.optim_step(ADAM))
        has_failed = False
        for future in sent:
            try:
                metrics = future.result(timeout=60).metrics
                if future is sent[-1]:
                    say(client, step=step, grad_norm=metrics["grad_norm"])
                else:
                    say(client, step=step, loss=metrics["loss:sum"])
            except Exception as error:
                has_failed = True
                say(client, step=step, is_step=future is sent[-1], error=f"{error!r}")
        if has_failed:
            return


def main() -> None:
    url, key, rank, count, steps = sys.argv[1:]
    threads = [
        threading.Thread(target=train, args=(client, url, key, int(rank), int(steps)))
        for client in range(int(count))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.flush()
    # Not waiting for the SDK's own threads, which go on telling a server that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
