"""The client of the job API: any controller answers for the whole cluster, so any one that answers will do.

`Client` and `AsyncClient` are for people, in a script or a notebook; `JobsClient` has the API's own messages, and is what they and the
command line stand on.
"""

from gcore.client.jobs import JobsClient
from gcore.client.patience import ENDED, MAX_ANSWER_BYTES, Patience, job_state_name

__all__ = ["ENDED", "MAX_ANSWER_BYTES", "JobsClient", "Patience", "job_state_name"]
