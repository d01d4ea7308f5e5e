"""Pictures and other large arrays: the store of their bytes, and how pictures become blobs and tokens.

`blobs` is the folder of a node's store, `server` its process, `client` calls it. `pictures` reads picture files,
`placeholders` computes their tokens, `picture_index` describes those of a data source. Blobs are named by SHA-256 and
belong to one job; messages and records name them (`gcore.types.Medium`).
"""
