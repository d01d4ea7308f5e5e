"""The table in docs/use/sampling-and-asynchrony.md matches the committed result."""

from benchmarks import report, rollout
from benchmarks.harness import read_result
from gcore.data.order import shard_lengths
from gcore.ledger.selection import StreamRules


def test_the_table_is_that_of_the_committed_result() -> None:
    written = (report.DOCS / "use" / "sampling-and-asynchrony.md").read_text()
    assert report.renewed("use/sampling-and-asynchrony.md", written) == written, "run `make bench-page`"
    assert report.issue_table(read_result("issue_ahead")) in written


def test_the_simulation_is_the_same_everywhere() -> None:
    """Virtual time and fixed seeds: one small case again, to the digit."""
    one, again = (rollout.Generation(issue_rules(4.0), 0.5, 16, 3) for _ in range(2))
    for generation in (one, again):
        for _ in range(4):
            generation.step()
    assert (one.now, one.made_tokens, one.used_tokens) == (again.now, again.made_tokens, again.used_tokens)
    assert 0 < one.used_tokens <= one.made_tokens


def test_without_a_filter_the_cap_changes_nothing() -> None:
    one, other = (rollout.Generation(issue_rules(cap), 0.0, 16, 3) for cap in (1.0, 4.0))
    for generation in (one, other):
        for _ in range(4):
            generation.step()
    assert (one.now, one.made_tokens) == (other.now, other.made_tokens)
    assert one.made_tokens == one.used_tokens


def issue_rules(cap: float) -> StreamRules:
    return StreamRules(shard_lengths(2000, 16), window=64, quota=8, issue_cap=cap)
