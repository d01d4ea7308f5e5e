"""The parts of pages that tell of what gcore was tried with: simulated seeds, mutations, and faults of real clusters.

Each function makes the Markdown of one result. Nothing here reads a file; `page` does.
"""

from __future__ import annotations

from collections import Counter

from page_form import Result, table


def sim(result: Result) -> str:
    """What the seeds were, and what became of them."""
    whole, bare = result["whole_clusters"], result["bare_protocol"]
    rows = [
        ["seeds, each in both simulations", f"{result['seeds']:,}"],
        ["seeds that failed", f"{len(result['failed_seeds'])}"],
        ["whole clusters: faults", f"{whole['faults']:,}"],
        ["whole clusters: steps committed", f"{whole['steps']:,}"],
        ["whole clusters: rollbacks", f"{whole['rollbacks']:,}"],
        ["whole clusters: revisions of the store, each looked at", f"{whole['store_revisions']:,}"],
        ["whole clusters: hours of made-up time", f"{whole['virtual_hours']:,.0f}"],
        ["bare protocol: steps committed", f"{bare['steps']:,}"],
    ]
    return table(["", "in all"], rows)


def mutations(result: Result) -> str:
    """What notices each."""
    rows = [
        f"| {row['mutation']} | {row['caught_by'].partition('[')[0] or '**nothing**'} |" for row in result["mutations"]
    ]
    missed = len(result["not_noticed"])
    said = f"{len(rows)} mutations, {result['noticed_by_simulation']} noticed by a simulation already, {missed} by nothing."
    if again := result.get("again"):
        said += f" {len(again['mutations'])} were looked for again at {again['commit']}."
    return "\n".join(["| taken out | noticed by |", "|---|---|", *rows]) + f"\n\n{said}"


def chaos(result: Result) -> str:
    """A line a fault, and how soon a killed controller's prompts are in a commit again."""
    rows = [
        f"| `{row['fault']}` | {row['what']} | {row['passed']} of {row['runs']} | {row['rollbacks']} |"
        for row in result["faults"]
    ]
    table_ = "\n".join(["| row | what | passed | rollbacks |", "|---|---|---:|---:|", *rows])
    found = result["recovery_of_a_killed_controller"]
    recovered = (
        f"Recovery after a controller's death, {found['count']} times: median {found['median_s']} s, 95th percentile "
        f"{found['p95_s']} s, at most {found['most_s']} s; the lease is {found['lease_ttl_s']} s, the goal {found['goal_p95_s']} s."
    )
    commits = Counter(run["commit"] for run in result["runs"]).most_common()
    made_at = f"{len(result['runs'])} runs: {', '.join(f'{count} at {commit}' for commit, count in commits)}."
    return f"{table_}\n\n{made_at} {recovered}"
