"""Level 0: what every room may use and nothing that knows about models."""
