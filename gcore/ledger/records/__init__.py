"""Stored records. Field names never change; a new field names in `came_with` its schema version."""
