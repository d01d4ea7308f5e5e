"""Serves what engines have to do, to the controller that plans a job's placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from controllers.service.refusals import NotFound
from controllers.service.statuses import Context, edge
from gcore.api.v1 import placement_pb2 as pb
from gcore.api.v1 import placement_pb2_grpc

if TYPE_CHECKING:  # imported when there is a job: see controllers.wire
    from controllers.job import JobRunner


class PlacementService(placement_pb2_grpc.PlacementServicer):
    """Implements gcore.api.v1.Placement."""

    def __init__(self, runner: Callable[[str], JobRunner | None], trouble: Callable[[], str] = str) -> None:
        """`trouble`: why the store cannot be brought back, if that is known here."""
        self._runner = runner
        self.trouble = trouble

    @edge
    async def Loads(self, request: pb.LoadsRequest, context: Context) -> pb.LoadsReply:
        """What the engines that this controller sees to have to do."""
        runner = self._runner(request.job_uid)
        if runner is None or not runner.is_working:
            raise NotFound(f"job {request.job_uid} is not worked on here")
        return await runner.loads()
