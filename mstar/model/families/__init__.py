"""Which checkpoint belongs to which network. A family declares where each tensor goes; components do the
rest."""
