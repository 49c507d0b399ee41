"""examples/tinker_server as a process, a proxy that misbehaves, and plain PyTorch beside them."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))

KEY = "tml-test"
START_TIMEOUT_S = 180
"""Two ranks that import DeepSpeed, transformers and peft, on a busy machine."""


class ServerProcess:
    """Two ranks under torchrun."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.states = folder / "states"
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "-m", "tinker_server", "--port", "0"]
        command += ["--api-key", KEY, "--state-dir", str(self.states), *arguments]
        path = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := re.search(r"^serving .* on (http\S+)$", self.log(), re.MULTILINE)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log()[-5000:]}")
            time.sleep(0.2)
        self.url = found[1]

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self, timeout: float = 60) -> None:
        """SIGTERM, as a service manager would send it to the launcher."""
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def state(self, path: str) -> dict[str, Any]:
        """What the server saved as tinker://<model>/weights/<name>."""
        import torch

        model_id, _, name = path.removeprefix("tinker://").split("/")
        file = self.states / model_id.replace(":", "-") / f"{name}.pt"
        state: dict[str, Any] = torch.load(file)
        return state


def post(url: str, path: str, body: bytes | dict[str, Any], key: str = KEY) -> tuple[int, Any]:
    """One request without the SDK. Returns the status and the decoded JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", f"/api/v1/{path}", data, {"X-API-Key": key})
    response = connection.getresponse()
    answer = (response.status, json.loads(response.read()))
    connection.close()
    return answer


class FaultyProxy:
    """Between the client and the server: passes everything on, but the next faults first.

    A fault is the path that it waits for, and what happens there, once: "drop" passes the request
    on but closes the connection without an answer; a number is answered as a status, and the
    request not passed on.
    """

    def __init__(self, server_url: str, **client_config: Any) -> None:
        self.faults: list[tuple[str, str | int]] = []
        self.arrivals: list[tuple[str, bytes]] = []
        """Path and body of every request passed on."""

        proxy, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                path = self.path.removeprefix("/api/v1/")
                if path == "client/config":
                    self.answer(200, "application/json", json.dumps(client_config).encode())
                    return
                with lock:
                    fault = next((each for each in proxy.faults if each[0] == path), None)
                    if fault is not None:
                        proxy.faults.remove(fault)
                if fault is not None and isinstance(fault[1], int):
                    self.answer(fault[1], "application/json", b'{"detail": "injected"}')
                    return
                proxy.arrivals.append((path, body))
                connection = http.client.HTTPConnection(
                    server_url.removeprefix("http://"), timeout=60
                )
                connection.request("POST", self.path, body, dict(self.headers))
                response = connection.getresponse()
                answer = response.read()
                connection.close()
                if fault is not None:
                    self.close_connection = True
                    return
                self.answer(response.status, response.headers["Content-Type"], answer)

            def answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if status == 429:
                    self.send_header("Retry-After", "0.2")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Reference:
    """One model trained by plain PyTorch: the sum of all losses, one AdamW.

    ``ranks`` is in how many partial sums a window's gradients are added up, in turns, before these
    are added: the order of the server's additions.
    """

    def __init__(self, weights: dict[str, Any], lora_rank: int, ranks: int = 2) -> None:
        import torch
        from tinker_server.models import Slots

        self._model = Slots(None, 1, lora_rank)
        self._parameters = self._model.parameters_of(0)
        with torch.no_grad():
            for name, param in self._parameters.items():
                param.copy_(weights[name])
        self.restart()
        self._sums: list[dict[str, Any]] = [{} for _ in range(ranks)]
        self._count = 0

    def restart(self) -> None:
        """A fresh optimizer."""
        import torch

        self._optimizer = torch.optim.AdamW(self._parameters.values(), foreach=True)

    def logprobs(self, tokens: Any, targets: Any) -> Any:
        import torch

        tokens, targets = torch.tensor(tokens)[None], torch.tensor(targets)[None]
        return self._model(0, tokens, torch.ones_like(tokens), targets)[0]

    def backward(self, loss: Any) -> None:
        """Add the gradient of one datum's loss to the window."""
        loss.backward()
        total = self._sums[self._count % len(self._sums)]
        self._count += 1
        for name, param in self._parameters.items():
            total[name] = param.grad + total[name] if name in total else param.grad
            param.grad = None

    def cross_entropy(self, tokens: Any, targets: Any, weights: Any) -> float:
        """Loss and gradient of one datum. Returns the loss."""
        import torch

        loss = -(self.logprobs(tokens, targets) * torch.tensor(weights)).sum()
        self.backward(loss)
        return loss.item()

    def step(
        self,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> float:
        """One update with what backward() added. Returns the gradient norm before clipping."""
        import torch

        for name, param in self._parameters.items():
            grads = [total[name] for total in self._sums if name in total]
            param.grad = sum(grads[1:], grads[0]) if grads else torch.zeros_like(param)
        self._optimizer.param_groups[0].update(
            lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay
        )
        norm = torch.nn.utils.clip_grad_norm_(
            list(self._parameters.values()), grad_clip_norm or float("inf")
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._sums = [{} for _ in self._sums]
        self._count = 0
        return float(norm)

    def weights(self) -> dict[str, Any]:
        return {name: param.detach().clone() for name, param in self._parameters.items()}


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
