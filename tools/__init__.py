"""What stands beside the engine: setting up, benchmarks, parity.

Tools use the public API and the client; nothing imports them, and they are not part of the package.
"""
