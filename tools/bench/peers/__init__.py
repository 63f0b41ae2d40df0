"""Ours beside others, in one run on one machine: same weights, dtype, prompts, new tokens and threads.

It starts each peer as a process of its own, measures them in turns (A B B A) and prints medians. It
measures speed only; whether the tokens are right is what tests and tools/parity are for.

    python -m tools.bench.peers --model smollm2-135m-instruct
"""
