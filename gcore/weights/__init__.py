"""Models on disk: folders that engines load and checkpoints that training goes on from; and copies of train states in memory.

No torch in here but in `broadcast`.
"""
