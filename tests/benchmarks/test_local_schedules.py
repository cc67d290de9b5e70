"""benchmarks/results/local.md has the table that benchmarks/local_schedules.py prints."""

from pathlib import Path

from benchmarks.local_schedules import CASES, table

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "local.md"


def test_the_table_of_the_page():
    assert "\n\n" + "\n".join(table()) + "\n\n" in PAGE.read_text(encoding="utf-8")


def test_the_shares_of_the_papers_settings():
    own = [case for case in CASES if case.rule.name == "qsr" and "default" not in case.rule_text]
    shares = [f"{100 * len(case.round_lengths()) / case.rule.total_steps:.1f}" for case in own]
    assert shares == ["10.4", "6.9", "9.3", "6.9", "39.7", "20.1"]
