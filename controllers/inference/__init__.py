"""Inference engines as this controller uses them: which there are, who answers a request, and what happens when one fails.

Read `pool` first, then `requests`. `rules` and `continuation` are pure. Engine servers are in `gcore.engines`; judges are engines with other
weights (`judge_engines`, `judges`).
"""
