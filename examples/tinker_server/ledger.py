"""Who asked for what: accepts requests once, puts them in order, and keeps their answers.

Plain Python; everything here is called from the event loop's thread.

[Note: every accepted request takes its turn]
A client numbers the requests of a model 1, 2, 3, ... (``seq_id``) and may send them out of order,
the first one last, so a request is accepted at once and waits here for its turn. A request that
can't be carried out takes its turn too, as a tombstone (``error`` is set): without it all later
ones would wait for ever, and it may have been a part of a window that must not be applied then.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

FORGET_AFTER_S = 600.0
"""How long an answer stays after it was given: its delivery may have got lost."""


MAX_AHEAD = 10_000
"""How far ahead of its turn a request may come."""


class RefusedError(Exception):
    """A request that is not accepted, with an HTTP status that the client does not retry."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(eq=False)
class Request:
    """One accepted request and, later, its answer: protobuf bytes or a JSON object."""

    kind: str
    model_id: str
    digest: bytes
    payload: Any = None
    error: str | None = None
    seq_id: int | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    answer: bytes | dict[str, Any] | None = None
    is_answered: asyncio.Event = field(default_factory=asyncio.Event)
    answered_at: float = 0.0
    is_delivered: bool = False


@dataclass(eq=False)
class Model:
    """The queue of one model."""

    session_id: str
    expected: int = 1
    """The next seq_id to be carried out."""

    accepted: dict[int, Request] = field(default_factory=dict)
    """By seq_id. An entry goes when its answer is forgotten."""

    early: dict[int, Request] = field(default_factory=dict)
    """Accepted, but something before them has not arrived yet."""

    stuck_since: float | None = None


@dataclass(eq=False)
class Session:
    last_seen: float
    models: dict[int, tuple[str, Request]] = field(default_factory=dict)
    """By the client's number: the model, and the request that created it."""


class Ledger:
    def __init__(self, *, gap_timeout: float, session_timeout: float) -> None:
        self.gap_timeout = gap_timeout
        self.session_timeout = session_timeout
        self.closed: str | None = None
        """Why nothing new is carried out, once the server shuts down."""
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._requests: dict[str, Request] = {}
        self._ready: deque[Request] = deque()
        self._has_ready = asyncio.Event()
        self._running: Request | None = None

    # Sessions

    def open_session(self, now: float) -> str:
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = Session(now)
        return session_id

    def touch(self, session_id: str, now: float) -> None:
        """The client of this session is alive. Raises RefusedError (410) if the session is over."""
        self._session(session_id).last_seen = now

    def finish(self, session_id: str) -> None:
        """End a session: its models are released once their accepted requests are done."""
        session = self._sessions.pop(session_id, None)
        for model_id, _ in session.models.values() if session else ():
            model = self._models.pop(model_id, None)
            if model is None:
                continue
            for _, request in sorted(model.early.items()):
                request.error = "the session ended before a request that this one waited for came"
                self._enqueue(request)
            self._enqueue(Request("release_model", model_id, b"", is_delivered=True))

    def _session(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RefusedError(410, f"session {session_id!r} is unknown here, or over")
        return session

    # Accepting

    def require_model(self, model_id: str) -> Model:
        """Raises RefusedError (404)."""
        model = self._models.get(model_id)
        if model is None:
            raise RefusedError(404, f"model {model_id!r} is unknown here, or its session is over")
        return model

    def create_model(
        self, session_id: str, number: int, kind: str, body: bytes, payload: Any, error: str | None
    ) -> Request:
        """Accept a request that makes a new model, once. Raises RefusedError."""
        session = self._session(session_id)
        digest = hashlib.sha256(body).digest()
        if number in session.models:
            return _same(session.models[number][1], digest)
        # The name that the SDK assumes when it creates a model from a saved state.
        model_id = f"{session_id}:train:{number}"
        request = Request(kind, model_id, digest, payload, error or self.closed)
        session.models[number] = (model_id, request)
        if not request.error:
            self._models[model_id] = Model(session_id)
        self._enqueue(request)
        return request

    def submit(
        self,
        model_id: str,
        seq_id: int,
        kind: str,
        body: bytes,
        payload: Any,
        error: str | None,
        now: float,
    ) -> Request:
        """Accept a numbered request, once: the same one again gets the same answer. Raises
        RefusedError."""
        # See [Note: every accepted request takes its turn]
        model = self.require_model(model_id)
        if not 1 <= seq_id < model.expected + MAX_AHEAD:
            raise RefusedError(
                400, f"seq_id = {seq_id} is not from 1 to {model.expected + MAX_AHEAD - 1}"
            )
        self._session(model.session_id).last_seen = now
        digest = hashlib.sha256(kind.encode() + body).digest()
        if seq_id in model.accepted:
            return _same(model.accepted[seq_id], digest)
        if seq_id < model.expected:
            raise RefusedError(422, f"seq_id {seq_id} of {model_id} was used long ago")
        request = Request(kind, model_id, digest, payload, error or self.closed, seq_id)
        model.accepted[seq_id] = request
        self._requests[request.request_id] = request
        model.early[seq_id] = request
        self._advance(model, now)
        return request

    def _advance(self, model: Model, now: float) -> None:
        before = model.expected
        while model.expected in model.early:
            self._enqueue(model.early.pop(model.expected))
            model.expected += 1
        if not model.early:
            model.stuck_since = None
        elif model.stuck_since is None or model.expected != before:
            model.stuck_since = now

    def _enqueue(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._ready.append(request)
        self._has_ready.set()

    # Carrying out

    async def next(self) -> Request:
        """Wait for the request whose turn it is: per model in the client's order, else first come,
        first served."""
        while not self._ready:
            self._has_ready.clear()
            await self._has_ready.wait()
        self._running = self._ready.popleft()
        return self._running

    def answer(self, request: Request, answer: bytes | dict[str, Any], now: float) -> None:
        request.answer, request.answered_at = answer, now
        request.payload = None
        request.is_answered.set()
        self._running = None
        if request.seq_id is None and isinstance(answer, dict) and "error" in answer:
            self._models.pop(request.model_id, None)  # it could not be created

    def find(self, request_id: str) -> Request:
        """Raises RefusedError (410)."""
        request = self._requests.get(request_id)
        if request is None:
            raise RefusedError(
                410, f"request {request_id!r} is unknown here, or its answer expired"
            )
        return request

    # Housekeeping

    def expire(self, now: float) -> None:
        """Give up gaps, end sessions whose client is gone, forget old answers."""
        for session_id, session in list(self._sessions.items()):
            if now - session.last_seen > self.session_timeout:
                self.finish(session_id)
        for model_id, model in self._models.items():
            if model.stuck_since is not None and now - model.stuck_since > self.gap_timeout:
                self._give_up_gap(model_id, model, now)
        for request in list(self._requests.values()):
            if request.is_answered.is_set() and now - request.answered_at > FORGET_AFTER_S:
                del self._requests[request.request_id]
                model = self._models.get(request.model_id)
                if model is not None and request.seq_id is not None:
                    model.accepted.pop(request.seq_id, None)

    def _give_up_gap(self, model_id: str, model: Model, now: float) -> None:
        """Fail what waits behind a request that never came, and whatever window that was a part
        of."""
        last = max(model.early)
        error = (
            f"request {model.expected} of this model did not arrive within {self.gap_timeout:g} s, "
            f"so this and all others up to {last} were not carried out; send them again"
        )
        for seq_id in range(model.expected, last + 1):
            if seq_id in model.early:
                model.early[seq_id].error = error
            else:
                lost = Request("lost", model_id, b"", None, error, seq_id, is_delivered=True)
                model.early[seq_id] = model.accepted[seq_id] = lost
        self._advance(model, now)

    def is_idle(self) -> bool:
        """Whether every accepted request has been answered, and its client has got the answer."""
        return self._running is None and all(
            request.is_answered.is_set() and request.is_delivered
            for request in self._requests.values()
        )

    def num_waiting(self) -> int:
        return sum(not request.is_answered.is_set() for request in self._requests.values())


def _same(request: Request, digest: bytes) -> Request:
    """The request that was accepted under this number, if this is the same one again."""
    if request.digest != digest:
        raise RefusedError(  # not 409, which the client would repeat for minutes
            422, f"another {request.kind} request was accepted under this number before"
        )
    return request
