"""Setting up a checkout: find a Python, make .venv, install the pinned packages, start a first server.

Standard library only, since it runs before anything is installed; no part of the engine.
"""
