"""The harness of the benchmarks: what it calls a ratio, and that a race is fair."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.harness import MIN_ROUNDS, Options, Report, Series, at_least, at_most, race, ratio, run


def test_a_ratio_is_the_median_of_the_ratios_of_single_rounds() -> None:
    ours, peer = Series([2.0, 20.0, 3.0]), Series([1.0, 10.0, 1.0])
    assert ratio(ours, peer) == 2.0  # and not 3.0, the ratio of the medians


def test_every_contestant_runs_once_a_round_and_begins_one_in_turn() -> None:
    calls: list[str] = []
    names = ["a", "b", "c"]
    series = race({name: lambda name=name: calls.append(name) for name in names}, 3, warm_up=0)  # type: ignore[misc]
    rounds = [calls[at : at + 3] for at in range(0, 9, 3)]
    assert all(sorted(each) == names for each in rounds)
    assert [each[0] for each in rounds] == names
    assert all(len(series[name].wall) == len(series[name].cpu) == 3 for name in names)


def test_a_race_over_its_budget_ends_with_the_rounds_that_a_median_needs() -> None:
    assert len(race({"a": lambda: None}, 100, budget_s=0.0)["a"].wall) == MIN_ROUNDS


@pytest.mark.parametrize(
    ("goal", "ratio_", "figure", "met"),
    [(at_most(3), 3.0, 9.0, True), (at_most(3), 3.1, 1.0, False), (at_least(0.9), 0.8, 9.0, False),
     (at_most(300, "figure"), None, 299.0, True), (at_most(300, "figure"), None, 301.0, False)],
)  # fmt: skip
def test_a_goal_judges_the_ratio_or_the_figure(goal: object, ratio_: float, figure: float, met: bool) -> None:
    report = Report("t")
    report.row("w", figure, "ms", ratio=ratio_, goal=goal)
    assert report.rows[0].met is met


def test_speeds_and_costs_are_turned_the_right_way_round() -> None:
    """Twice as fast as the peer is a ratio of 2 in MB/s, and half the CPU is one of 0.5."""
    report = Report("t")
    report.rates("w", Series([1.0], [0.5]), "peer", Series([2.0], [1.0]), 1_000_000)
    speed, cost = report.rows
    assert (speed.figure, speed.ratio) == (1.0, 2.0) and cost.ratio == 0.5


def test_a_quick_run_leaves_no_results(tmp_path: Path) -> None:
    run("x", lambda options: Report("t"), Options(quick=True), tmp_path)
    assert not list(tmp_path.iterdir())
    run("x", lambda options: Report("t"), Options(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
