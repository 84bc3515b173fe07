"""Plain torch models that tests and training compare with. The only torch here."""
