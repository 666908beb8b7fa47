"""Where the state of a run comes from and where it goes: initial weights, restore, save, export."""
