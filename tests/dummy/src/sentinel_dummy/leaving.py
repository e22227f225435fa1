"""A plugin that ends the process when it is imported, after some last words."""

import sys

print("goodbye")  # noqa: T201
sys.exit(0)
