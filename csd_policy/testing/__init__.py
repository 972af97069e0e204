"""Tools for tests, here and in users' own packages: enumerable models, the contract of a policy."""

from csd_policy.testing.contract import check_policy, make_candidates
from csd_policy.testing.tables import TableModel, joint_law, law_error, random_table

__all__ = [
    "TableModel",
    "check_policy",
    "joint_law",
    "law_error",
    "make_candidates",
    "random_table",
]
