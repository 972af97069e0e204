"""Tools for tests, here and in users' own packages: enumerable models, the contract of a policy."""

from csd_policy.testing.contract import check_policy, make_candidates
from csd_policy.testing.own_law import own_law
from csd_policy.testing.risk_contract import check_risk_map
from csd_policy.testing.tables import (
    TableModel,
    image_counts,
    joint_law,
    law_error,
    random_table,
    table_laws,
)

__all__ = [
    "TableModel",
    "check_policy",
    "check_risk_map",
    "image_counts",
    "joint_law",
    "law_error",
    "make_candidates",
    "own_law",
    "random_table",
    "table_laws",
]
