"""A progress bar over the passes of a batch; silent where standard error is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]


@contextmanager
def pass_bar(slots: int, label: str) -> Iterator[Callable[[int, list[int]], None]]:
    """The ``on_pass`` of ``JacobiDecoder.generate`` for images of ``slots`` slots each."""
    with tqdm(desc=label, unit="token", disable=not sys.stderr.isatty()) as bar:

        def on_pass(number: int, done: list[int]) -> None:
            bar.total = slots * len(done)
            per_pass = sum(done) / len(done) / number
            bar.set_postfix_str(f"pass {number}, {per_pass:.2f} tokens per pass", refresh=False)
            bar.update(sum(done) - bar.n)

        yield on_pass


@contextmanager
def step_bar(steps: int, label: str) -> Iterator[Callable[[], None]]:
    """A function to call after each of ``steps`` steps; shows the time left."""
    with tqdm(desc=label, total=steps, disable=not sys.stderr.isatty()) as bar:

        def step() -> None:
            bar.update()

        yield step
