"""The process of a train rank: launch document, gRPC service, state of received samples.

Read `main` first. `feed` is pure.
"""
