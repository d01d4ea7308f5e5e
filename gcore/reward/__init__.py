"""Scoring: what a reward is and how it is found (`registry`), and the rules that gcore brings (`rules`)."""
