"""The deployment: one frozen record, and how file, environment and flags become it."""
