"""Inference engines as a controller uses them: pool, routing, requests, retries, judges.

Read `pool` first, then `requests`. `rules` and `continuation` are pure. Engine servers are in `gcore.engines`. A judge
is a model with its own engines (`judge_engines`, `judges`).
"""
