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
        args = {
            name: value.to_config() if isinstance(value, Parametrized) else value
            for name, value in self.parameters().items()
        }
        cls = type(self)
        return {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": args}

    def parameters(self) -> dict[str, Any]:
        """The constructor's arguments by name; ValueError if one was not stored."""
        names = self.parameter_names()
        if missing := [name for name in names if not hasattr(self, name)]:
            raise ValueError(
                f"{type(self).__name__} does not store its argument {missing[0]!r}, "
                f"expected self.{missing[0]}"
            )
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        args = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{type(self).__name__}({args})"
