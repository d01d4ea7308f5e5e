"""All decisions about one job, from its view. Pure: no clock, no network, no store.

A rule is a function `view -> Iterator[Intent]`; an intent is an action with the condition under which it is executed.
Read `view` first (what is known about a job), then `actions` (the possible decisions), then `decide` (which rules
apply, in which order). The other modules contain the rules by subject. `controllers.job.executor` executes intents.
"""
