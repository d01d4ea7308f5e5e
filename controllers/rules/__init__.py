"""Every decision that is made from the view of one job. Pure: no clock, no network, no store.

A rule is a function `view -> Iterator[Intent]`. Read `view` first (what is known of a job), then `actions` (what may be decided), then
`decide` (which rules apply, in which order). The other modules are the rules by subject. `job.executor` carries intents out.
"""
