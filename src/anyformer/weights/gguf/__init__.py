"""GGUF files: the container, the types of numbers it stores, and what a model's tensors are called in it."""
