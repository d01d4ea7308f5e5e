"""The API's list of a job's shards: all of them, with the owner and the first prompt without an outcome."""

from __future__ import annotations

from builders import KEYS, stored

from controllers.api.jobs import list_shards
from gcore.config import parse_spec
from gcore.data.order import Cursors, ShardCursor
from gcore.ledger import chain
from gcore.ledger.chain import ChainWriter
from gcore.ledger.mirror import JobMirror
from gcore.ledger.records.chain import Assignment
from gcore.ledger.records.job import JobRecord

SPEC = parse_spec(
    {
        "name": "j",
        "model": {"path": "m"},
        "data": {"path": "d", "shards": 16},
        "flow": {"steps": 9},
        "rollout": {"max_new_tokens": 4},
    }
)
JOB = JobRecord(uid="u", name="j", spec=SPEC.model_dump(mode="json"), run_dir="/r", created=0.0, prompts=40)


def test_a_job_that_has_not_begun_has_all_its_shards_and_nobody_has_them() -> None:
    shards = list_shards(JobMirror(KEYS, job=stored(JOB))).shards
    assert [one.shard for one in shards] == list(range(16))
    assert sum(one.length for one in shards) == 40
    assert {(one.node, one.incarnation, one.data_epoch, one.seq, one.ahead) for one in shards} == {("", "", 0, 0, 0)}


def test_each_shard_says_whose_it_is_and_how_far() -> None:
    owners = (0, 1, None, *(0,) * 13)
    cursors = Cursors((ShardCursor(7, 0b1011), *(ShardCursor(),) * 15))
    head = chain.base_entry(16, "w", ChainWriter("a", "n")).head.model_copy(update={"cursors": cursors})
    assigned = Assignment(members=("node-0.aa", "node-1.bb"), owners=owners)
    mirror = JobMirror(KEYS, job=stored(JOB), head=stored(head), assign=stored(assigned))
    first, second, third, *_ = list_shards(mirror).shards
    # Three prompts are in the first shard: two whole epochs, and the second prompt of the third one.
    assert (first.length, first.data_epoch, first.seq, first.ahead) == (3, 2, 1, 3)
    assert (first.node, first.incarnation) == ("node-0", "node-0.aa")
    assert (second.node, third.node, third.incarnation) == ("node-1", "", "")
