"""What ``csd-policy list`` shows: the classes and models that come with the package."""

import inspect

from csd_policy import drafts, policies, risk
from csd_policy.arguments import class_names
from csd_policy.models import SHIPPED, adapter_of, shipped_models
from csd_policy.risk import RiskMap, Segmenter
from csd_policy.tables import text_table


def listing() -> str:
    """Policies, draft strategies, risk maps, segmenters and models: a table of each."""
    described = {
        "draft": [getattr(drafts, name) for name in class_names("csd_policy.drafts")],
        "risk map": [getattr(risk, name) for name in class_names("csd_policy.risk", RiskMap)],
        "segmenter": [getattr(risk, name) for name in class_names("csd_policy.risk", Segmenter)],
    }
    tables = [_policies()]
    for kind, classes in described.items():
        rows = [(cls.__name__, first_line(cls)) for cls in classes]
        tables.append(text_table((kind, "what it does"), rows))
    models = [
        (name, first_line(adapter_of(SHIPPED / name / "image_model.json")))
        for name in shipped_models()
    ]
    tables.append(text_table(("model", "what it is"), models))
    return "\n\n".join(tables)


def first_line(thing: object) -> str:
    """First line of the docstring."""
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _policies() -> str:
    rows = []
    for name in class_names("csd_policy.policies"):
        policy = getattr(policies, name)
        law = "exact" if policy().exact else "relaxed"
        rows.append((name, law, policy.strength or "-", first_line(policy)))
    return text_table(("policy", "law", "strength", "what it does"), rows)
