"""A quick start: what a verb does before the first token is mostly making objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hurry() -> Iterator[None]:
    """Without searches for garbage among what is older, again and again, while modules are imported.

    They are a tenth of the time of importing torch. What is young is looked through, rarely: what an import leaves
    behind would otherwise stay. What is there afterwards is not looked at again.
    """
    before = gc.get_threshold()
    gc.set_threshold(20_000, 50, 1_000)
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*before)
