"""A flow, a reward and a filter of one's own; `README.md` says what they do."""
