"""The version, in one place: packaging reads it without importing torch."""

__version__ = "0.1.0"
