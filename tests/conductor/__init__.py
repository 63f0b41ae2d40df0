"""The conductor's plain classes."""
