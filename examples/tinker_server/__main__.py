"""Starts the server on every rank; see README.md.

torchrun --nproc-per-node 2 -m tinker_server --port 8300
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepspeed
import torch
import uvicorn
from deepspeed.accelerator import get_accelerator

from .app import App, Info
from .controller import Controller
from .ledger import Ledger
from .team import Team
from .trainer import Trainer
from .wire import Limits

log = logging.getLogger("tinker_server")


class Server(uvicorn.Server):
    """Answers what it has accepted before it goes."""

    def __init__(self, config: uvicorn.Config, app: App, drain_s: float) -> None:
        super().__init__(config)
        self._app, self._drain_s = app, drain_s
        self._draining: asyncio.Task[None] | None = None

    async def serve(self, sockets: Any = None) -> None:
        self._loop = asyncio.get_running_loop()
        tasks = [asyncio.create_task(self._app.work()), asyncio.create_task(self._app.keep_house())]
        for task in tasks:
            task.add_done_callback(self._stop_on_failure)
        await super().serve(sockets)
        for task in tasks:
            task.cancel()

    def handle_exit(self, _sig: int, _frame: Any) -> None:
        # Ctrl-C comes twice: from the terminal, and from torchrun.
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._draining is None:
            log.info("shutting down: finishing what was accepted")
            self._draining = self._loop.create_task(self._drain())

    def _stop_on_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.error("stopping: a fault in the server itself", exc_info=task.exception())
            self.should_exit = True

    async def _drain(self) -> None:
        await self._app.drain(self._drain_s)
        self.should_exit = True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinker_server")
    parser.add_argument("--port", type=int, default=8300, help="on 127.0.0.1; 0: any")
    parser.add_argument("--api-key", default=os.environ.get("TINKER_SERVER_API_KEY"))
    parser.add_argument(
        "--model", help="local folder of a transformers model; default: tiny, random"
    )
    parser.add_argument("--lora-rank", type=int, default=32, help="0: train all parameters")
    parser.add_argument("--slots", type=int, default=4, help="models trained at the same time")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=1, help="of ZeRO")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences per rank")
    parser.add_argument("--state-dir", type=Path, default=Path("tinker_states"))
    parser.add_argument("--gap-timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--session-timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--drain-timeout", type=float, default=25.0, help="seconds, at SIGTERM")
    options = parser.parse_args()
    if options.api_key is None:
        options.api_key = f"tml-{secrets.token_hex(16)}"
        if os.environ.get("RANK", "0") == "0":
            print(f"API key: {options.api_key}", flush=True)
    options.state_dir = options.state_dir.resolve()
    return options


def serve(options: argparse.Namespace, team: Team, trainer: Trainer, engine_thread: Any) -> None:
    """Rank 0."""
    base = trainer.module.base_config()
    name = options.model or "tiny-random"
    app = App(
        Ledger(gap_timeout=options.gap_timeout, session_timeout=options.session_timeout),
        controller := Controller(team, slots=options.slots, state_dir=options.state_dir),
        engine_thread,
        info=Info(name, options.lora_rank, Limits(base.vocab_size, base.max_position_embeddings)),
        api_key=options.api_key,
    )
    config = uvicorn.Config(
        app.routes(),
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
    )
    socket = config.bind_socket()
    port = socket.getsockname()[1]
    print(f"serving {name} on http://127.0.0.1:{port}", flush=True)
    asyncio.run(Server(config, app, options.drain_timeout).serve(sockets=[socket]))
    controller.log_models()
    engine_thread.submit(team.dismiss).result()


def main() -> int:
    options = parse_arguments()
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    log.setLevel("INFO")
    accelerator = get_accelerator()
    rank = int(os.environ.get("RANK", "0"))
    # One thread for all that touches the engine: devices and streams are chosen per thread.
    with ThreadPoolExecutor(1) as engine_thread:

        def start() -> tuple[Team, Trainer]:
            if accelerator.device_name() == "cpu":
                # An optional op that takes a minute to build; gloo does without it.
                sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
            accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            deepspeed.init_distributed(
                accelerator.communication_backend_name() or "gloo", auto_mpi_discovery=False
            )
            team = Team()
            trainer = Trainer(
                team,
                path=options.model,
                slots=options.slots,
                lora_rank=options.lora_rank,
                stage=options.stage,
                micro=options.micro_batch_size,
            )
            team.employ(trainer)
            return team, trainer

        team, trainer = engine_thread.submit(start).result()
        if rank == 0:
            serve(options, team, trainer, engine_thread)
        else:
            # A launcher sends these to every rank. Rank 0 decides when the others are done.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            engine_thread.submit(team.follow).result()
        engine_thread.submit(torch.distributed.destroy_process_group).result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
