"""What every test shares: one thread, property tests without deadlines, and rare searches for cycles of objects."""

import gc

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile(
    "house", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("house")


def pytest_collection_finish():
    """What is imported by now stays. Looking through it again and again for garbage took a tenth of all time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
