"""Comparing models with other implementations: reference data for tests, speed side by side."""
