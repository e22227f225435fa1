"""What every plugin owes, as checks that run over any plugin."""
