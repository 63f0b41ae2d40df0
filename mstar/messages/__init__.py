"""What actors say to each other: immutable records and their wire forms, nothing else.

No decisions, no I/O, no torch. A record that crosses a ring is a frozen msgspec struct or a
columnar frame; a step of a cell is a StepPlan in the slot of a step ring.
"""
