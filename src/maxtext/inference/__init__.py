"""Level 6: models that answer."""
