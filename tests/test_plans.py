"""What has been settled for a kind of call."""

from __future__ import annotations

from typing import Any

import pytest

from moe_kernels import plans


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> plans.Plans[str]:
    monkeypatch.setattr(plans, "_every", [])
    return plans.Plans()


def test_there_are_never_too_many(known: plans.Plans[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    for i in range(4):
        known[(i,)] = str(i)
    assert dict(known) == {(3,): "3"}


def test_set_aside(known: plans.Plans[str]) -> None:
    other: plans.Plans[Any] = plans.Plans()
    known[(1,)] = "kept"
    with plans.set_aside():
        assert not known
        known[(1,)] = "new"
        other[(2,)] = "new"
        first: plans.Plans[str] = plans.Plans()  # of a module that is imported in here
        first[(3,)] = "new"
    assert dict(known) == {(1,): "kept"}
    assert not other
    assert not first
    with pytest.raises(RuntimeError), plans.set_aside():
        raise RuntimeError
    assert dict(known) == {(1,): "kept"}
