"""Inference engines as this controller uses them: pool, routing, requests, retries, judges.

Read `pool` first, then `requests`. `rules` and `continuation` are pure. Engine servers are in `gcore.engines`; judges are engines with other
weights (`judge_engines`, `judges`).
"""
