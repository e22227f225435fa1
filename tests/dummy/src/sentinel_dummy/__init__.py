"""Plugins of somebody else."""
