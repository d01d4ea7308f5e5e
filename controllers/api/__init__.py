"""The gRPC services of a controller.

`jobs` is the job API, `fleet` nodes and quotas, `streams` events and metrics as they come, `logs` worker logs, `peers` what controllers ask one
another. `edge` authenticates, limits and serves calls; `submission` checks and creates jobs. Read `jobs` first.
"""
