"""The process of a train rank: launch document, gRPC service, what it holds and may apply.

Read `main` first. `feed` is pure.
"""
