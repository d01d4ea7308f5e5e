"""The model that a job begins with: by folder, or by its name on a hub. `gcore.models.resolve` is where to begin."""
