"""A model of a job on its slots: the real policies plan it, in made-up time. See `docs/placement-simulation.md`."""
