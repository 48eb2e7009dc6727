"""Weights of other houses: configurations, names and files of published models, read and written."""
