"""Adapters for training frameworks: import the one you use."""

from __future__ import annotations
