"""What one client may have at once, and how fast: on a clock that the test turns."""

from __future__ import annotations

import pytest

from draftwire.errors import Overloaded
from target_service.limits import ClientLimits


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    clock = Clock()
    limits = ClientLimits(rate=2.0, burst=3, clock=clock)
    for _ in range(3):
        limits.spend("a")
    with pytest.raises(Overloaded) as caught:
        limits.spend("a")
    assert caught.value.reason == "RATE_LIMIT"
    assert caught.value.retry_after_s == pytest.approx(0.5)
    clock.now_s += caught.value.retry_after_s
    limits.spend("a")
    with pytest.raises(Overloaded):
        limits.spend("a")
    clock.now_s += 60
    for _ in range(3):
        limits.spend("a")
    with pytest.raises(Overloaded):
        limits.spend("a")


def test_what_is_refused_costs_nothing() -> None:
    """Else a client that hammers would never come in again."""
    clock = Clock()
    limits = ClientLimits(rate=1.0, burst=1, clock=clock)
    limits.spend("a")
    for _ in range(9):
        clock.now_s += 0.1
        with pytest.raises(Overloaded):
            limits.spend("a")
    clock.now_s += 0.11
    limits.spend("a")


def test_each_client_has_its_own_bucket_and_its_own_count() -> None:
    limits = ClientLimits(max_requests=1, rate=0.001, burst=1, clock=Clock())
    limits.spend("a")
    limits.spend("b")
    with limits.place("a"), limits.place("b"), pytest.raises(Overloaded) as caught, limits.place("a"):
        raise AssertionError("a second request of one client")
    assert caught.value.reason == "CLIENT_LIMIT"
    with limits.place("a"):
        pass


def test_no_limits_by_default() -> None:
    limits = ClientLimits()
    for _ in range(100):
        limits.spend("a")
    with limits.place("a"), limits.place("a"):
        pass


def test_clients_that_come_once_are_forgotten() -> None:
    clock = Clock()
    limits = ClientLimits(rate=10.0, burst=1, clock=clock)
    for client in range(20_000):
        clock.now_s += 0.2
        limits.spend(str(client))
    assert len(limits._buckets) <= 4097
