"""gRPC and its security: versions and error details of calls, certificates, tokens. `v1` is generated from `protos/`."""
