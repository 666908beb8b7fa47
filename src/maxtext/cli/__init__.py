"""Level 9: argv and the terminal. Only entry modules, as `maxtext.train`, import it; the package
itself imports its aliases."""
