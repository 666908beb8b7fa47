"""Level 0: helpers without knowledge of models, for all packages."""
