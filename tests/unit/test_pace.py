"""When a draft worker hurries: from no pause between rounds until long ones, and not in between."""

from __future__ import annotations

from ssd_ascend.speculation.pace import Pace


def rounds(pace: Pace, waited_s: float, count: int = 9) -> bool:
    """Rounds of one second each."""
    for _ in range(count):
        pace.saw_round(waited_s, 1.0)
    return pace.hurries


def test_haste_begins_without_pauses_and_ends_with_long_ones() -> None:
    pace = Pace()
    assert not pace.hurries
    assert not rounds(pace, 0.2), "some pause: no need to begin"
    assert rounds(pace, 0.01)
    assert rounds(pace, 0.2), "some pause, which haste may have made"
    assert not rounds(pace, 0.5)


def test_one_long_pause_changes_nothing() -> None:
    pace = Pace()
    assert rounds(pace, 0.0)
    assert rounds(pace, 60.0, count=1)
