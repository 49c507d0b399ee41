"""Carries out requests, one after the other, on rank 0: whose window is on the engine.

[Note: many windows, one engine]
The engine has one accumulation window, and every model one of its own, for as long as its client
likes. The engine's window holds the gradients of one model, the first to open one. A
forward_backward of another model meanwhile runs forward only, which is all that its answer needs,
and is remembered. At that model's optim_step the engine's window is discarded, what was remembered
runs again, now with backward, and the update is applied; the model whose window was discarded has
its turn at its own optim_step in the same way. Weights change at a model's own optim_step only, so
the gradients are the same. Nobody waits for anybody else's optim_step, and a request runs at most
twice.

[Note: optim_step ends the window]
An optim_step ends the window of its model, applied or not. It is not applied if a forward_backward
of the window failed, or if its own arguments are wrong: clients send ahead without waiting for
answers, and an update with a part of the gradients would be silently wrong.
"""

from __future__ import annotations

import logging
import math
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .ledger import Request
from .team import FailedOnRanksError, Team
from .wire import UserError, Work, encode_output

log = logging.getLogger("tinker_server")


@dataclass(eq=False)
class ModelState:
    slot: int
    window: list[Work] = field(default_factory=list)
    """The forward_backwards since the last optim_step."""

    poison: str | None = None
    """Why the window can't be applied."""

    broken: str | None = None
    """Why the weights can't be trusted any more."""

    updates: int = 0

    def num_data(self) -> int:
        return sum(len(work.data) for work in self.window)


class Controller:
    def __init__(self, team: Team, *, slots: int, state_dir: Path) -> None:
        self._team = team
        self._state_dir = state_dir
        self._free = list(range(slots))
        self._models: dict[str, ModelState] = {}
        # Whose window is on the engine, if it isn't empty.
        self._resident: ModelState | None = None

    def execute(self, request: Request) -> bytes | dict[str, Any]:
        """Carry out a request. Returns its answer, which for a failure is an error."""
        try:
            handler = getattr(self, f"_{request.kind}")
            return handler(request)  # type: ignore[no-any-return]
        except UserError as error:
            return {"error": str(error), "category": "user"}
        except FailedOnRanksError as error:
            return {"error": str(error), "category": "server"}

    def _create_model(self, request: Request) -> dict[str, Any]:
        _refuse_tombstone(request)
        seed = request.payload["seed"]
        model = self._take_slot(request.model_id)
        self._prepare(request, model, "reset", seed=secrets.randbits(32) if seed is None else seed)
        return {"type": "create_model", "model_id": request.model_id}

    def _create_from_state(self, request: Request) -> dict[str, Any]:
        _refuse_tombstone(request)
        path = self.file_of(request.payload["path"])
        model = self._take_slot(request.model_id)
        self._prepare(
            request, model, "load", path=str(path), optimizer=request.payload["optimizer"]
        )
        return {"type": "load_weights", "model_id": request.model_id}

    def _take_slot(self, model_id: str) -> ModelState:
        if not self._free:
            raise UserError(
                f"all {len(self._models)} slots are taken; finish another session "
                "(ServiceClient.close), or start the server with more --slots"
            )
        self._models[model_id] = ModelState(self._free.pop(0))
        return self._models[model_id]

    def _prepare(self, request: Request, model: ModelState, method: str, **arguments: Any) -> None:
        try:
            self._team.call(method, slot=model.slot, **arguments)
        except FailedOnRanksError:
            self._release_model(request)
            raise

    def _release_model(self, request: Request) -> dict[str, Any]:
        model = self._models.pop(request.model_id, None)
        if model is not None:
            self._drop_window(model)
            self._free.append(model.slot)
            log.info("%s: released after %d updates", request.model_id, model.updates)
        return {}

    def _forward(self, request: Request) -> bytes:
        _refuse_tombstone(request)
        return self._run(self._usable(request), request.payload, train=False)

    def _forward_backward(self, request: Request) -> bytes:
        model = self._models.get(request.model_id)
        try:
            _refuse_tombstone(request)
            model = self._usable(request)
            # See [Note: many windows, one engine]
            if self._resident is None and not model.window and model.poison is None:
                self._resident = model
            answer = self._run(model, request.payload, train=self._resident is model)
        except (UserError, FailedOnRanksError) as error:
            if model is not None:
                self._drop_window(model)
                model.poison = model.poison or f"its forward_backward {request.seq_id}: {error}"
            raise
        if model.poison is None:
            model.window.append(request.payload)
        return answer

    def _run(self, model: ModelState, work: Work, *, train: bool) -> bytes:
        first = model.num_data()
        shares = self._team.call("run", slot=model.slot, work=work, first=first, train=train)
        logprobs: dict[int, np.ndarray] = {}
        for share in shares:
            logprobs |= share["logprobs"]
        metrics = {
            "loss:sum": sum(share["loss"] for share in shares),
            "micro_batches:sum": float(shares[0]["micro_batches"]),
        }
        return encode_output([logprobs[i] for i in range(len(work.data))], metrics)

    def _optim_step(self, request: Request) -> dict[str, Any]:
        # See [Note: optim_step ends the window]
        model = self._models.get(request.model_id)
        try:
            _refuse_tombstone(request)
            model = self._usable(request)
            if model.poison is not None:
                raise UserError(
                    "no update: the gradient window was discarded, because a part of it failed "
                    f"({model.poison}). The next forward_backward begins a clean window"
                )
            return self._step(model, request)
        finally:
            if model is not None:
                self._drop_window(model)
                model.poison = None

    def _step(self, model: ModelState, request: Request) -> dict[str, Any]:
        is_recomputed = self._resident is not model
        if is_recomputed:
            if self._resident is not None:
                self._team.call("discard")
            self._resident = model
            first = 0
            for work in model.window:
                self._team.call("run", slot=model.slot, work=work, first=first, train=True)
                first += len(work.data)
        norm = self._team.call("grad_norm")[0]
        if not (math.isfinite(norm) and norm >= 0):  # the square of a norm can overflow, too
            raise UserError(
                "no update: the gradients of this window are not finite, or their norm is not. It "
                "was discarded, and the next forward_backward begins a clean one"
            )
        try:
            self._team.call("step", slot=model.slot, adam=request.payload)
        except FailedOnRanksError as error:
            model.broken = f"its optim_step {request.seq_id} failed half way ({error})"
            raise
        # step() has closed it.
        self._resident = None
        model.updates += 1
        metrics = {
            "grad_norm": norm,
            "learning_rate": request.payload.learning_rate,
            "forward_backwards": float(len(model.window)),
            "recomputed": float(is_recomputed),
            "updates": float(model.updates),
        }
        return {"type": "optim_step", "metrics": metrics}

    def _save_weights(self, request: Request) -> dict[str, Any]:
        """Gradients that no optim_step has applied are not saved, and stay."""
        _refuse_tombstone(request)
        model = self._usable(request)
        path = f"tinker://{request.model_id}/weights/{request.payload['name']}"
        file = self.file_of(path, must_exist=False)
        if file.exists() and not request.payload["overwrite"]:
            raise UserError(f"{path} exists; choose another name, or overwrite=True")
        self._team.call("save", slot=model.slot, path=str(file))
        return {"type": "save_weights", "path": path}

    def _load_weights(self, request: Request) -> dict[str, Any]:
        _refuse_tombstone(request)
        model = self._usable(request)
        if request.seq_id != 1:
            raise UserError(
                f"LoadWeights is not permitted with seq_id {request.seq_id}: only a model's first "
                "request may load; create a training client from the state instead"
            )
        path = self.file_of(request.payload["path"])
        try:
            self._team.call(
                "load", slot=model.slot, path=str(path), optimizer=request.payload["optimizer"]
            )
        except FailedOnRanksError as error:
            model.broken = f"loading {request.payload['path']} failed half way ({error})"
            raise
        return {"type": "load_weights", "path": request.payload["path"]}

    def _lost(self, request: Request) -> dict[str, Any]:
        """A request that never came. Whatever it was, the window may lack it."""
        return self._forward_backward(request)  # type: ignore[return-value]

    def _usable(self, request: Request) -> ModelState:
        model = self._models.get(request.model_id)
        if model is None:
            raise UserError(f"{request.model_id} could not be created, or was released")
        if model.broken is not None:
            raise UserError(f"this model is unusable: {model.broken}; load a saved state")
        return model

    def _drop_window(self, model: ModelState) -> None:
        model.window = []
        if self._resident is model:
            self._resident = None
            self._team.call("discard")

    def file_of(self, path: str, *, must_exist: bool = True) -> Path:
        """Where tinker://<model>/weights/<name> is. Raises UserError."""
        scheme, _, rest = path.partition("://")
        parts = rest.split("/")
        if (
            scheme != "tinker"
            or len(parts) != 3
            or parts[1] != "weights"
            or any(part in ("", ".", "..") or "\0" in part for part in parts)
        ):
            raise UserError(f"path = {path!r} is not tinker://<model>/weights/<name>")
        file = self._state_dir / parts[0].replace(":", "-") / f"{parts[2]}.pt"
        if must_exist and not file.exists():
            raise UserError(f"there is no {path}")
        return file

    def log_models(self) -> None:
        for model_id, model in self._models.items():
            log.info("%s: %d updates at shutdown", model_id, model.updates)


def _refuse_tombstone(request: Request) -> None:
    # See [Note: every accepted request takes its turn] in ledger.py
    if request.error is not None:
        raise UserError(request.error)
