"""Reading a run: its numbers as JSON lines in its folder, and what takes them from there to trackers."""
