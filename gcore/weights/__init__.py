"""Models on disk: folders that engines load and checkpoints that training goes on from. No torch in here but in `broadcast`."""
