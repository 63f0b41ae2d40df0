"""How a program talks to a server: a synchronous and an asynchronous client and a private engine.

Both clients have the same methods and results, over the native protocol of a Unix socket or over
HTTP. Nothing here decides anything about serving, and nothing imports torch.
"""
