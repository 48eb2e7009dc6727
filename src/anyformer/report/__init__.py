"""Self-contained HTML pages about what anyformer did: no network, no scripts, the same bytes for the same input."""

from anyformer.report.page import write_report

__all__ = ["write_report"]
