"""The one model and its parts."""
