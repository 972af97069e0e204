"""Objects that are their constructor's arguments: repr, YAML and copies for policies and drafts."""

import inspect
from typing import Any


class Parametrized:
    """Arguments with defaults, stored unchanged under their names, make the object again."""

    @classmethod
    def parameter_names(cls) -> list[str]:
        """Names of the constructor's arguments."""
        if cls.__init__ is object.__init__:
            return []
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def to_config(self) -> dict[str, Any]:
        """``class_path`` and ``init_args``, from which a config makes the object again."""
        args = {}
        for name in self.parameter_names():
            value = getattr(self, name)
            args[name] = value.to_config() if isinstance(value, Parametrized) else value
        cls = type(self)
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": args}

    def __repr__(self) -> str:
        args = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.parameter_names())
        return f"{type(self).__name__}({args})"
