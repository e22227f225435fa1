"""`sentinel-bench calibrate`: fences that do not ban the honest."""

import click


@click.command()
def calibrate():
    """Todo."""
