"""The records that gcore stores in etcd, as JSON.

Field names never change. The schema version that added a field is listed in the class's `came_with`.
"""
