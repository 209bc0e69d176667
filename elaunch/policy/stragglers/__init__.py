"""Workers and links that are slow: who they are, by what the members measure. Pure."""
