"""Adapters for training frameworks: import the one you use."""
