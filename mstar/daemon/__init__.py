"""The composition root of a running server: sockets, model files, wiring, supervisor, signals, exit codes.

It turns a deployment into processes and watches over them. It serves no request itself, and knows
nothing of tokens, prompts or steps.
"""
