"""Tests of the actor runtime, most of them with real processes running the toy actors of toys.py."""
