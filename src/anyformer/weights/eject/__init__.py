"""A specification as one readable PyTorch file, composed of the pieces that lie beside the modules they mirror."""

from anyformer.weights.eject.file import Surroundings, eject

__all__ = ["Surroundings", "eject"]
