"""A long prompt beside decodes, and short prompts behind a burst of long ones: with chunks and without.

A real daemon with a real model on this machine, a fresh one a turn, arms in turns (A B B A). Every token is
one event at the client: a bias keeps to one token that prints. Step costs are measured between the turns,
on the same machine in the same quarter of an hour, and the simulator, given them, has to tell both figures
within 20 %.

    python -m tools.bench.long_prompt --budgets off,128 --rounds 2 --json FILE --plot PNG
"""
