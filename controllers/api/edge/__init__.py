"""The network edge of the API: server, authentication, authorization, limits on calls, and error statuses.

Read `gate` first: it authenticates a call from its headers, before the body is read.
"""
