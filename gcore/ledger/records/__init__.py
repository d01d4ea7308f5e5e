"""Stored records. Field names never change; a new field says in `came_with` which schema version brought it."""
