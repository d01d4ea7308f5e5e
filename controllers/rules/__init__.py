"""All decisions about one job, from its view. Pure: no clock, no network, no store.

A rule is a function `view -> Iterator[Intent]`. Read `view` first (what is known about a job), then `actions` (the possible decisions), then
`decide` (which rules apply, in which order). The other modules are the rules by subject. `job.executor` executes intents.
"""
