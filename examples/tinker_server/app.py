"""HTTP on rank 0: accepts requests at once, hands out answers when there are any."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .controller import Controller
from .ledger import Ledger, RefusedError, Request
from .wire import Limits, UserError, parse_adam, parse_forward_backward, work_of

log = logging.getLogger("tinker_server")

MAX_BODY = 16 * 2**20
"""The SDK cuts a call into requests of at most 5 MB, but a single sequence may be larger."""

HOLD_POLL_S = 20.0
"""The client polls again at once, so "not yet" is said as late as its timeout of 45 s allows."""

PROTOBUF = "application/x-protobuf"


@dataclass
class Info:
    """What the server tells about itself, and checks requests against."""

    model_name: str
    lora_rank: int
    limits: Limits


class App:
    def __init__(
        self,
        ledger: Ledger,
        controller: Controller,
        engine_thread: Executor,
        *,
        info: Info,
        api_key: str,
    ) -> None:
        self.ledger, self.controller, self.info = ledger, controller, info
        self._engine_thread = engine_thread
        self._api_key = api_key

    # Work

    async def work(self) -> None:
        """Carry out accepted requests, for ever. All engine work is done in one thread."""
        loop = asyncio.get_running_loop()
        while True:
            request = await self.ledger.next()
            try:
                answer = await loop.run_in_executor(
                    self._engine_thread, self.controller.execute, request
                )
            except Exception as error:
                # A fault in this program: tell the client, go on for the others.
                log.exception("%s of %s", request.kind, request.model_id)
                text = f"{type(error).__name__}: {error}"
                answer = {"error": text, "category": "server"}
            self.ledger.answer(request, answer, time.monotonic())

    async def keep_house(self) -> None:
        while True:
            await asyncio.sleep(1)
            self.ledger.expire(time.monotonic())

    async def drain(self, limit_s: float, linger_s: float = 1.0) -> None:
        """Wait until every accepted request was answered and every answer fetched, for a while.
        What comes in meanwhile is answered too, but not carried out."""
        self.ledger.closed = "no effect: the server is shutting down"
        begin = idle_since = time.monotonic()
        while time.monotonic() - begin < limit_s:
            if not self.ledger.is_idle():
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since > linger_s:
                log.info("drained: every answer was fetched")
                return
            await asyncio.sleep(0.05)
        log.warning("drained for %g s; some answers were not fetched", limit_s)

    # HTTP

    def routes(self) -> Starlette:
        handlers: dict[str, Callable[[HttpRequest, bytes], Awaitable[Response]]] = {
            "client/config": self._empty,
            "client/dynamic_config": self._empty,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "load_weights": self._load_weights,
            "retrieve_future": self._retrieve,
        }
        routes = [
            Route(f"/api/v1/{path}", self._guarded(handler), methods=["POST"])
            for path, handler in handlers.items()
        ]
        return Starlette(routes=[*routes, Route("/api/v1/healthz", self._health)])

    def _guarded(self, handler: Any) -> Any:
        """Check the key and the size, and turn what is refused into a response."""

        async def endpoint(http: HttpRequest) -> Response:
            given = http.headers.get("X-API-Key", "")
            if not hmac.compare_digest(given.encode(), self._api_key.encode()):
                return _detail(401, "wrong or no X-API-Key")
            body = bytearray()
            async for part in http.stream():
                body += part
                if len(body) > MAX_BODY:
                    return _detail(413, f"a request has more than {MAX_BODY} bytes")
            try:
                return await handler(http, bytes(body))
            except RefusedError as error:
                return _detail(error.status, str(error))

        return endpoint

    async def _health(self, _http: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "waiting": self.ledger.num_waiting()})

    async def _empty(self, _http: HttpRequest, _body: bytes) -> Response:
        return JSONResponse({})

    async def _telemetry(self, _http: HttpRequest, _body: bytes) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, _http: HttpRequest, _body: bytes) -> Response:
        session_id = self.ledger.open_session(time.monotonic())
        return JSONResponse({"type": "create_session", "session_id": session_id})

    async def _heartbeat(self, _http: HttpRequest, body: bytes) -> Response:
        self.ledger.touch(_text(_object(body), "session_id"), time.monotonic())
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, http: HttpRequest, _body: bytes) -> Response:
        self.ledger.finish(http.path_params["session_id"])
        return JSONResponse({})

    async def _create_model(self, _http: HttpRequest, body: bytes) -> Response:
        message = _object(body)
        try:
            payload, error = {"seed": self._checked_seed(message)}, None
        except UserError as failure:
            payload, error = {}, str(failure)
        return self._created(message, "create_model", body, payload, error)

    def _created(
        self, message: dict[str, Any], kind: str, body: bytes, payload: Any, error: str | None
    ) -> Response:
        session_id, number = _text(message, "session_id"), _integer(message, "model_seq_id")
        return _accepted(self.ledger.create_model(session_id, number, kind, body, payload, error))

    def _checked_seed(self, message: dict[str, Any]) -> int | None:
        """Refuse, instead of ignoring, what this server can't do for a model."""
        self._check_base(message)
        lora = message.get("lora_config") or {}
        if lora.get("rank") != self.info.lora_rank:
            raise UserError(
                f"lora_config.rank = {lora.get('rank')}, but this server trains rank "
                f"{self.info.lora_rank} (0: all parameters); ask for that, or start the server "
                "with another --lora-rank"
            )
        for part in ("train_mlp", "train_attn", "train_unembed"):
            if lora.get(part, True) is not True:
                raise UserError(f"lora_config.{part} = {lora[part]!r}: it is always trained here")
        seed = lora.get("seed")
        if seed is not None and not isinstance(seed, int):
            raise UserError(f"lora_config.seed = {seed!r} is not a whole number")
        return seed

    def _check_base(self, message: dict[str, Any]) -> None:
        if message.get("base_model", self.info.model_name) != self.info.model_name:
            raise UserError(
                f"base_model = {message['base_model']!r}; this server has {self.info.model_name!r}"
            )
        optimizer = (message.get("optimizer_config") or {}).get("type", "adamw")
        if optimizer != "adamw":
            raise UserError(f"optimizer_config.type = {optimizer!r}; this server has 'adamw'")

    async def _get_info(self, _http: HttpRequest, body: bytes) -> Response:
        model_id = _text(_object(body), "model_id")
        self.ledger.require_model(model_id)
        name, rank = self.info.model_name, self.info.lora_rank
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model_id,
                "model_data": {"model_name": name},
                "model_name": name,
                "is_lora": rank > 0,
                "lora_rank": rank,
            }
        )

    async def _forward_backward(self, _http: HttpRequest, body: bytes) -> Response:
        try:
            message = parse_forward_backward(body)
        except ValueError as error:
            return _detail(400, str(error))
        work, error = None, None
        try:
            work = work_of(message, self.info.limits)
        except UserError as failure:
            error = str(failure)
        kind = "forward" if message.forward_only else "forward_backward"
        return self._submitted(message.model_id, message.seq_id, kind, body, work, error)

    async def _optim_step(self, _http: HttpRequest, body: bytes) -> Response:
        return self._numbered("optim_step", body, parse_adam)

    async def _save_weights(self, _http: HttpRequest, body: bytes) -> Response:
        def payload(message: dict[str, Any]) -> dict[str, Any]:
            name = message.get("path")
            if not isinstance(name, str):
                raise UserError(f"path = {name!r} is not a name")
            path = f"tinker://{_text(message, 'model_id')}/weights/{name}"
            self.controller.file_of(path, must_exist=False)
            return {"name": name, "overwrite": bool(message.get("overwrite"))}

        return self._numbered("save_weights", body, payload)

    async def _load_weights(self, _http: HttpRequest, body: bytes) -> Response:
        def payload(message: dict[str, Any]) -> dict[str, Any]:
            self._check_base(message)
            path = str(message.get("path"))
            self.controller.file_of(path, must_exist=False)
            return {"path": path, "optimizer": bool(message.get("optimizer"))}

        message = _object(body)
        if "model_id" in message:
            return self._numbered("load_weights", body, payload)
        try:
            contents, error = payload(message), None
        except UserError as failure:
            contents, error = {}, str(failure)
        return self._created(message, "create_from_state", body, contents, error)

    def _numbered(self, kind: str, body: bytes, parse: Callable[[dict[str, Any]], Any]) -> Response:
        message = _object(body)
        payload, error = None, None
        try:
            payload = parse(message)
        except UserError as failure:
            error = str(failure)
        model_id, seq_id = _text(message, "model_id"), _integer(message, "seq_id")
        return self._submitted(model_id, seq_id, kind, body, payload, error)

    def _submitted(
        self, model_id: str, seq_id: int, kind: str, body: bytes, payload: Any, error: str | None
    ) -> Response:
        now = time.monotonic()
        return _accepted(self.ledger.submit(model_id, seq_id, kind, body, payload, error, now))

    async def _retrieve(self, _http: HttpRequest, body: bytes) -> Response:
        request = self.ledger.find(_text(_object(body), "request_id"))
        try:
            await asyncio.wait_for(request.is_answered.wait(), HOLD_POLL_S)
        except TimeoutError:
            # The one "not yet" that the client doesn't log.
            waiting = {"type": "try_again", "request_id": request.request_id}
            return JSONResponse({**waiting, "queue_state": "active"}, status_code=408)

        def delivered() -> None:
            request.is_delivered = True

        done = BackgroundTask(delivered)
        if isinstance(request.answer, bytes):
            return Response(request.answer, media_type=PROTOBUF, background=done)
        return JSONResponse(request.answer, background=done)


def _accepted(request: Request) -> Response:
    return JSONResponse({"request_id": request.request_id, "model_id": request.model_id})


def _detail(status: int, text: str) -> Response:
    return JSONResponse({"detail": text}, status_code=status)


def _object(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise RefusedError(400, f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise RefusedError(400, "not a JSON object")
    return message


def _text(message: dict[str, Any], name: str) -> str:
    if not isinstance(message.get(name), str):
        raise RefusedError(400, f"{name} = {message.get(name)!r} is not a string")
    return str(message[name])


def _integer(message: dict[str, Any], name: str) -> int:
    if not isinstance(message.get(name), int):
        raise RefusedError(400, f"{name} = {message.get(name)!r} is not a whole number")
    return int(message[name])
