"""A quick start: what a verb does before the first token is mostly making objects that stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hurry() -> Iterator[None]:
    """Without garbage collection, which goes through every module's objects again and again while modules are imported.

    That is a tenth of the time of importing torch. What is there afterwards is not looked at again.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
