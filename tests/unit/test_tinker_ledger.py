"""The queue of examples/tinker_server: order, repetition, tombstones, gaps, sessions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tinker_server.ledger import FORGET_AFTER_S, MAX_AHEAD, Ledger, RefusedError, Request


class Driver:
    """A ledger with one model, and a clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ledger = Ledger(gap_timeout=60, session_timeout=300)
        self.now = 0.0
        self.session = self.ledger.open_session(self.now)
        self.model = self.new_model(0)

    def new_model(self, number: int) -> str:
        request = self.ledger.create_model(self.session, number, "create_model", b"", None, None)
        assert self.run() == [request]
        return request.model_id

    def send(self, seq_id: int, body: bytes = b"", **changes: Any) -> Request:
        arguments = {"model_id": self.model, "kind": "forward_backward", "error": None} | changes
        return self.ledger.submit(seq_id=seq_id, body=body, payload=None, now=self.now, **arguments)

    def run(self) -> list[Request]:
        """Carry out everything whose turn it is."""

        async def run() -> list[Request]:
            done = []
            while True:
                try:
                    request = await asyncio.wait_for(self.ledger.next(), 0.01)
                except asyncio.TimeoutError:
                    return done
                answer = {"error": request.error} if request.error else {"done": request.seq_id}
                self.ledger.answer(request, answer, self.now)
                done.append(request)

        return self._loop.run_until_complete(run())

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)


@pytest.fixture
def driver() -> Iterator[Driver]:
    loop = asyncio.new_event_loop()
    yield Driver(loop)
    loop.close()


def numbers(requests: list[Request]) -> list[int | None]:
    return [request.seq_id for request in requests]


def test_requests_run_in_the_clients_order_however_they_arrive(driver: Driver) -> None:
    for seq_id in (3, 2, 5):
        driver.send(seq_id)
    assert driver.run() == []
    driver.send(1)
    assert numbers(driver.run()) == [1, 2, 3]
    driver.send(4)
    assert numbers(driver.run()) == [4, 5]


def test_the_same_request_again_is_the_same_request(driver: Driver) -> None:
    first = driver.send(1, b"body")
    assert driver.send(1, b"body") is first
    assert driver.run() == [first]
    assert driver.send(1, b"body") is first  # after it ran, too
    assert driver.run() == []


@pytest.mark.parametrize("change", [{"body": b"other"}, {"kind": "optim_step"}])
def test_another_request_under_the_same_number_is_refused(
    driver: Driver, change: dict[str, Any]
) -> None:
    driver.send(1, b"body")
    with pytest.raises(RefusedError, match="under this number before") as refusal:
        driver.send(1, **({"body": b"body"} | change))
    assert refusal.value.status == 422  # the client would repeat a 409 for minutes
    assert numbers(driver.run()) == [1]


def test_what_cannot_be_carried_out_takes_its_turn(driver: Driver) -> None:
    driver.send(2)
    driver.send(1, error="bad datum")
    one, two = driver.run()
    assert one.answer == {"error": "bad datum"}
    assert two.answer == {"done": 2}


@pytest.mark.parametrize("seq_id", [0, -1, MAX_AHEAD + 1])
def test_a_number_out_of_range_is_refused(driver: Driver, seq_id: int) -> None:
    with pytest.raises(RefusedError, match="seq_id"):
        driver.send(seq_id)
    driver.send(MAX_AHEAD)


def test_models_do_not_wait_for_each_other(driver: Driver) -> None:
    other = driver.new_model(1)
    driver.send(2)
    driver.send(1, model_id=other)
    assert [request.model_id for request in driver.run()] == [other]


def test_a_gap_is_given_up_with_all_that_waits_behind_it(driver: Driver) -> None:
    driver.send(1)
    driver.send(3, kind="optim_step")
    driver.send(5)
    assert numbers(driver.run()) == [1]
    driver.later(59)
    assert driver.run() == []
    driver.later(2)
    done = driver.run()
    # The lost ones have their turn as well: they may have been parts of the window.
    assert [(r.seq_id, r.kind) for r in done] == [
        (2, "lost"),
        (3, "optim_step"),
        (4, "lost"),
        (5, "forward_backward"),
    ]
    assert all("request 2 of this model did not arrive" in (r.error or "") for r in done)
    with pytest.raises(RefusedError):
        driver.send(2)  # too late
    driver.send(6)
    assert numbers(driver.run()) == [6]


def test_a_gap_that_moves_on_is_not_given_up(driver: Driver) -> None:
    driver.send(3)
    driver.later(50)
    driver.send(1)
    driver.later(50)
    driver.send(2)
    done = driver.run()
    assert numbers(done) == [1, 2, 3]
    assert all(request.error is None for request in done)


def test_a_silent_session_ends_and_its_model_is_released(driver: Driver) -> None:
    driver.send(1)
    early = driver.send(3)
    driver.later(299)
    driver.ledger.touch(driver.session, driver.now)
    driver.later(299)
    assert "release_model" not in [request.kind for request in driver.run()]
    driver.later(2)
    done = driver.run()
    assert done[-1].kind == "release_model"
    assert early.is_answered.is_set()
    with pytest.raises(RefusedError) as refusal:
        driver.send(4)
    assert refusal.value.status == 404
    with pytest.raises(RefusedError) as refusal:
        driver.ledger.touch(driver.session, driver.now)
    assert refusal.value.status == 410


def test_accepted_requests_are_carried_out_before_their_session_ends(driver: Driver) -> None:
    driver.send(1)
    driver.ledger.finish(driver.session)
    assert [request.kind for request in driver.run()] == ["forward_backward", "release_model"]


def test_a_model_that_could_not_be_created_takes_no_requests(driver: Driver) -> None:
    driver.ledger.create_model(driver.session, 1, "create_model", b"", None, "no slot")
    driver.run()
    with pytest.raises(RefusedError):
        driver.send(1, model_id=f"{driver.session}:train:1")


def test_answers_are_kept_for_a_while_and_then_forgotten(driver: Driver) -> None:
    request = driver.send(1)
    driver.run()
    request.is_delivered = True
    driver.ledger.touch(driver.session, driver.now)
    driver.now += FORGET_AFTER_S - 1
    driver.ledger.touch(driver.session, driver.now)
    driver.later(0)
    assert driver.ledger.find(request.request_id) is request
    driver.later(2)
    with pytest.raises(RefusedError, match="expired"):
        driver.ledger.find(request.request_id)
    with pytest.raises(RefusedError, match="long ago"):
        driver.send(1)


def test_a_closed_ledger_accepts_without_effect_and_knows_when_all_is_told(driver: Driver) -> None:
    before = driver.send(1)
    driver.ledger.closed = "shutting down"
    after = driver.send(2)
    assert driver.run() == [before, after]
    assert before.answer == {"done": 1}
    assert after.answer == {"error": "shutting down"}
    assert not driver.ledger.is_idle()
    for request in driver.ledger._requests.values():
        request.is_delivered = True
    assert driver.ledger.is_idle()


def test_an_early_request_is_not_forgotten_by_a_closed_ledger(driver: Driver) -> None:
    for request in driver.ledger._requests.values():
        request.is_delivered = True
    assert driver.ledger.is_idle()
    driver.send(2).is_delivered = True
    assert not driver.ledger.is_idle()
