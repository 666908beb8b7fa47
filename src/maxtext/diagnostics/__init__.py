"""Level 5: what a run tells about itself and about the machine."""
