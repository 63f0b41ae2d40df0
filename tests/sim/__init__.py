"""The simulator: random schedules, planted faults, and what must be caught."""
