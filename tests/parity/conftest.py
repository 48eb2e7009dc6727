"""The peers are looked up nowhere; without transformers nothing here runs."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def peer():
    """Skips where transformers is not installed, and keeps it off the network and quiet where it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        pytest.importorskip("transformers")
        yield
