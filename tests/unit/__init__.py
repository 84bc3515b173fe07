"""Units: one file a noun and aspect."""
