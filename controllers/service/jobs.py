"""The Jobs service, put together from its subjects. Any controller answers for the whole cluster: it reads the store, and follows
jobs through its mirror.

Errors leave as gRPC statuses (`controllers.service.statuses`): one sentence, and a constant for programs.
"""

from __future__ import annotations

from controllers.service.accounts import Accounts
from controllers.service.lifecycle import Lifecycle
from controllers.service.nodes import Nodes
from controllers.service.quotas import QuotaVerbs
from controllers.service.streams import Streams


class JobsService(Lifecycle, Streams, Accounts, Nodes, QuotaVerbs):
    """Implements gcore.api.v1.Jobs."""
