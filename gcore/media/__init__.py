"""Pictures and other large arrays of prompts and samples, kept as files that are named by their SHA-256 (*blobs*).

Each node has one store of blobs. `blobs` is its folder, with the rules of `accounts`: pins, reservations, collection.
`server` is its process, `transfers` fetches blobs from the stores of other nodes, `client` calls a store. `protocol` has
the errors and the job keys. Read `blobs` first.
"""
