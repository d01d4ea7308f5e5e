"""Templates that ship with gcore: plain files, rendered by `gcore.prepare.project`. No code of its own."""
