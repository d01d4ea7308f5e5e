"""The gRPC services of a controller.

`jobs` is the job API, `fleet` nodes and quotas, `streams` events and metrics, `logs` worker logs, `peers` the requests between
controllers. `edge` authenticates, limits and serves calls; `submission` checks and creates jobs. Read `jobs` first.
"""
